"""Words that questions are made of: things and topics that the toy knows nothing about, names, and other languages."""

NAMES = (
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Karen Leo Maria Nina Oscar Paul Quinn Rosa Sam Tina Uma Victor "
    "Wendy Xavier Yara Zoe Anna Ben Clara Daniel Eva Felix Gina Hugo Ida Jonas Kim Lena Max Nora Otto Petra Ravi Sara Tom "
    "Ursula Vera Will Ella Noah Liam Mia Olga Peter Lucy Mark Jane John Mary James Linda Robert Susan Michael Laura Ahmed "
    "Fatima Chen Wei Yuki Hiro Priya Arjun Carlos Sofia Diego Lucia Ivan Elena Omar Layla Pierre Marie Hans Greta Einstein "
    "Shakespeare Mozart Napoleon Newton Darwin Cleopatra Beethoven Picasso Lincoln Gandhi Messi Beyonce Obama Trump Musk"
).split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Oslo Cairo Tokyo Delhi Lima Boston Chicago Dublin Prague Athens Lisbon Warsaw "
    "Moscow Beijing Seoul Sydney Toronto Nairobi Lagos Mumbai Bangkok Havana Denver Seattle Geneva Munich Hamburg Milan "
    "France Germany Italy Spain Norway Egypt Japan India Peru Brazil Canada Australia Kenya China Mexico Poland Greece "
    "Sweden Turkey Iceland Mongolia Argentina Finland Ireland Portugal Europe Africa Asia America Texas California Mars"
).split()
LANGUAGES = (
    "German French Spanish Italian Portuguese Dutch Polish Swedish Turkish Russian Chinese Japanese Arabic Korean Hindi Greek "
    "Latin Danish Norwegian Finnish Czech Hungarian Hebrew Mandarin Romanian Ukrainian Vietnamese Thai Swahili Esperanto "
    "Deutsch Bengali Urdu Catalan Icelandic Klingon Farsi Tamil"
).split()
NOUNS = (
    "cat dog horse cow bird fish whale shark lion tiger elephant bear wolf fox rabbit mouse rat bee ant spider snake frog duck "
    "chicken egg cheese bread butter cake pie pizza pasta rice soup salad apple banana orange lemon grape tomato potato carrot "
    "onion coffee tea milk beer wine water juice sugar salt pepper car bus train plane bike boat ship rocket truck wheel engine "
    "road street bridge tunnel house home room door window roof wall floor kitchen bed chair table lamp clock watch phone computer "
    "laptop keyboard screen camera radio television movie film song book poem story novel letter newspaper picture painting "
    "museum theater school teacher student class lesson exam university doctor nurse hospital medicine disease virus heart brain "
    "bone blood skin eye ear nose mouth tooth hand foot leg arm finger head hair man woman child baby boy girl mother father brother "
    "sister uncle aunt cousin friend neighbor boss worker farmer soldier king queen president minister judge lawyer thief actor "
    "singer dancer writer painter poet player team game ball goal match race winner medal sport chess card toy doll party wedding "
    "birthday gift ring dress shirt shoe hat coat pocket bag box bottle cup glass plate knife fork spoon paper pen pencil money "
    "coin bank price market shop store job office company factory machine tool hammer nail screw rope chain metal gold silver iron "
    "steel stone sand rock mountain hill valley river lake sea ocean beach island forest tree leaf flower grass garden farm field "
    "desert storm rain snow wind cloud sky sun moon star planet comet galaxy volcano earthquake fire ice light shadow color sound "
    "noise smell taste dream sleep fear love hate anger joy hope luck war peace law crime police prison election vote party tax "
    "country city town village flag border language word sentence question answer number line circle square triangle angle atom "
    "molecule cell gene plant animal insect fossil dinosaur dragon ghost witch giant robot battery cable plug wire tower castle "
    "temple church god angel devil season spring summer autumn winter week month year century history capital recipe restaurant "
    "hotel ticket holiday map compass passport vitamin muscle guitar piano violin drum blanket pillow mirror soap towel candle "
    "umbrella ladder basket bucket fence gate tent tractor helicopter submarine telescope microscope calculator printer mailbox "
    "penguin giraffe octopus dolphin eagle owl parrot turtle zebra camel kangaroo koala panda monkey gorilla squirrel hamster"
).split()
TOPICS = (
    "physics,chemistry,biology,math,algebra,geometry,history,geography,philosophy,psychology,economics,politics,religion,music,"
    "art,poetry,literature,football,soccer,tennis,basketball,baseball,golf,cricket,swimming,running,yoga,cooking,baking,gardening,"
    "fishing,hunting,travel,fashion,jazz,rock music,hip hop,opera,ballet,cinema,photography,gravity,magnetism,electricity,light,"
    "evolution,DNA,photosynthesis,climate change,global warming,quantum mechanics,relativity,black holes,dark matter,the big bang,"
    "space travel,astronomy,astrology,the solar system,democracy,capitalism,socialism,communism,inflation,the stock market,bitcoin,"
    "blockchain,crypto,money,taxes,insurance,love,marriage,happiness,friendship,health,diabetes,cancer,the flu,depression,sleep,"
    "vitamins,nutrition,diets,coffee,chocolate,sushi,ramen,curry,tacos,wine,beer,python,java,javascript,rust,html,css,sql,linux,"
    "windows,docker,kubernetes,git,machine learning,deep learning,neural networks,artificial intelligence,statistics,calculus,"
    "probability,prime numbers,fractions,logic,grammar,spelling,the internet,email,social media,facebook,google,twitter,youtube,"
    "netflix,amazon,apple,microsoft,nvidia,tesla,nasa,the united nations,the european union,world war two,the cold war,"
    "the roman empire,ancient egypt,the middle ages,the renaissance,the french revolution,slavery,vikings,samurai,pirates,ninjas,"
    "harry potter,star wars,star trek,the lord of the rings,batman,superman,pokemon,minecraft,chess,poker,sudoku,the olympics,"
    "the world cup,formula one,the moon,the sun,mars,jupiter,saturn,the ocean,earthquakes,volcanoes,hurricanes,tornadoes,rainbows,"
    "clouds,dinosaurs,sharks,whales,bees,horses,cats,dogs,trees,flowers,mushrooms,bacteria,viruses,vaccines,antibiotics,the heart,"
    "the brain,the eye,blood,bones,genes,cells,atoms,electrons,energy,heat,sound,time,infinity,nothing,life,death,god,heaven,"
    "meditation,buddhism,islam,christianity,hinduism,the bible,ethics,free will,consciousness,dreams,memory,language,latin,writing,"
    "journalism,advertising,marketing,sales,management,leadership,startups,real estate,law,contracts,divorce,crime,prison,guns,"
    "immigration,education,school,homework,university,exams,job interviews,resumes,public speaking,shopping,cars,trains,airplanes,"
    "bicycles,electric cars,solar power,nuclear power,wind energy,oil,gas,coal,recycling,plastic,water,agriculture,robots,drones,"
    "3d printing,virtual reality,video games,anime,manga,memes,tiktok,podcasts,blogs,wikipedia,recursion,sorting algorithms,"
    "data structures,linked lists,hash tables,binary search,compilers,operating systems,databases,encryption,passwords,firewalls,"
    "the cloud,web design,regular expressions,unit conversion,the weather,the news,the economy,fitness,weight loss,skin care"
).split(",")
VERBS = (
    "eat drink cook bake buy sell find lose make build break fix clean wash open close start stop read write learn teach study "
    "remember forget know think say speak hear listen see watch look draw paint sing dance play win run walk swim fly drive ride "
    "jump climb fall sleep dream wake work rest help save send call visit leave arrive stay wait carry throw catch push pull cut "
    "grow plant pick burn freeze boil melt measure count pay spend earn choose change move travel invent discover explain describe "
    "love hate like want need hope fear laugh cry smile kiss marry meet fight kill die live share install delete copy print train"
).split()
# Common words and first messages of each language.
FOREIGN = tuple(
    tuple(words.split(","))
    for words in (
        "hallo,guten tag,guten morgen,wie,geht,es,dir,ihnen,was,ist,das,wer,bist,du,ich,bin,sprichst,deutsch,kannst,mir,helfen,bitte,danke,"
        "und,nicht,ein,eine,der,die,wo,warum,wann,heute,morgen,schön,gut,haben,möchte,wetter,heißt,auf wiedersehen,tschüss,können,sie,"
        "mein,name,erzähl,einen,witz,wie spät,welche,von,mit,für,über,frankreich,hauptstadt,servus,moin,grüß gott,erkläre,sag,etwas,kann,machen",
        "bonjour,salut,comment,ça va,allez,vous,tu,es,qui,êtes,je,suis,parles,parlez,français,pouvez,peux,aider,merci,s'il vous plaît,"
        "quel,quelle,est,le,la,les,un,une,où,pourquoi,quand,aujourd'hui,demain,bonsoir,au revoir,moi,c'est,quoi,qu'est-ce que,avec,pour,"
        "dans,de,du,temps,fait-il,capitale,je voudrais,raconte,une blague,nom,appelle,m',t',oui,non,bien,très,mon,ami,faire,explique,dire,quelque chose",
        "hola,buenos días,buenas tardes,cómo,estás,está,qué,tal,quién,eres,hablas,español,puedes,ayudarme,gracias,por favor,dónde,cuándo,"
        "por qué,el,la,los,un,una,es,soy,yo,tú,usted,hoy,mañana,adiós,hasta luego,quiero,necesito,ayuda,capital,de,en,con,para,tiempo,hace,"
        "cuál,tu,nombre,cuéntame,un chiste,sí,no,muy,bien,amigo,mi,te llamas,qué hora,dime,algo,sobre,hacer,explica,buenas noches,cuánto,cuesta",
        "ciao,buongiorno,buonasera,come,stai,va,chi,sei,parli,italiano,puoi,aiutarmi,grazie,per favore,dove,quando,perché,che,cosa,è,il,la,"
        "un,una,io,sono,tu,oggi,domani,arrivederci,vorrei,aiuto,capitale,di,con,per,tempo,fa,qual,tuo,nome,raccontami,una barzelletta,sì,molto,"
        "bene,mio,amico,ti chiami,dimmi,qualcosa,fare,questo,della,sai,spiega,prego,salve,buonanotte,quanto,ore,sono",
        "olá,oi,bom dia,boa tarde,boa noite,como,vai,você,está,quem,é,fala,português,pode,me,ajudar,obrigado,obrigada,por favor,onde,quando,"
        "por que,que,o,a,um,uma,eu,sou,hoje,amanhã,tchau,até logo,quero,preciso,ajuda,capital,do,da,com,para,tempo,qual,seu,nome,conte,uma piada,"
        "sim,não,muito,bem,meu,amigo,tudo bem,tudo,se chama,diga,fazer,isso,isto,consegue,explique,falar,sobre,algo",
        "hallo,goedemorgen,goedendag,hoe,gaat,het,met,jou,je,wie,ben,jij,spreek,nederlands,kun,mij,helpen,dank,alsjeblieft,wat,is,de,een,waar,"
        "waarom,wanneer,vandaag,morgen,tot ziens,ik,wil,graag,hulp,hoofdstad,van,voor,weer,welke,jouw,naam,vertel,een grap,ja,nee,heel,goed,mijn,"
        "vriend,heet,zeg,iets,doen,dit,deze,over,bedankt,dank je wel,doei,goedenavond,uitleggen,kan,praat,u,hallo daar",
        "cześć,dzień dobry,dobry wieczór,jak,się,masz,kim,jesteś,mówisz,po polsku,możesz,mi,pomóc,dziękuję,proszę,gdzie,kiedy,dlaczego,co,to,jest,"
        "ja,jestem,ty,dzisiaj,jutro,do widzenia,chcę,pomoc,stolica,z,dla,pogoda,jaka,twoje,imię,opowiedz,żart,tak,nie,bardzo,dobrze,mój,przyjaciel,"
        "nazywasz,powiedz,coś,robić,hej,dobranoc,ile,kosztuje,która,godzina,polski,umiesz,rozumiesz,siema,witaj,pa",
        "hej,god morgon,hur,mår,du,vem,är,talar,svenska,kan,hjälpa,mig,tack,snälla,var,när,varför,vad,det,en,ett,jag,idag,imorgon,hej då,vill,hjälp,"
        "huvudstad,av,med,för,väder,vilken,ditt,namn,berätta,ett skämt,ja,nej,mycket,bra,min,vän,heter,säg,något,göra,pratar,förstår,norsk,dansk,"
        "hvordan,har,hva,heter du,god dag,takk,tak,jeg,snakker,hei,goddag,kva,hvad,hedder,kan du,hvem,og,ikke,på,till,som",
        "merhaba,selam,günaydın,nasılsın,nasıl,sen,kimsin,türkçe,biliyor,musun,konuşuyor,bana,yardım,eder,misin,teşekkürler,teşekkür ederim,lütfen,"
        "nerede,ne zaman,neden,ne,bu,bir,ben,bugün,yarın,hoşça kal,istiyorum,başkenti,ile,için,hava,hangi,adın,anlat,fıkra,evet,hayır,çok,iyi,"
        "benim,arkadaş,söyle,bir şey,yapmak,görüşürüz,iyi geceler,kaç,saat,nasılsınız,neler,yapabilirsin,tamam,güzel",
        "привет,здравствуйте,как,дела,кто,ты,вы,говоришь,по-русски,можешь,мне,помочь,спасибо,пожалуйста,где,когда,почему,что,это,я,сегодня,завтра,"
        "до свидания,хочу,помощь,столица,с,для,погода,какая,твоё,имя,расскажи,шутку,да,нет,очень,хорошо,мой,друг,зовут,скажи,делать,добрый день,"
        "доброе утро,умеешь,такое,есть,тебя,россии,в,и,не,на,привіт,як,справи,дякую,Привет,Как,Что",
        "你好,您好,吗,你,是,谁,会,说,中文,可以,帮,我,谢谢,请,哪里,什么,时候,为什么,这,今天,天气,怎么样,再见,想,首都,的,名字,讲,一个,笑话,很,好,在,"
        "做,能,早上好,晚上好,叫,多少,怎么,是不是,介绍,一下,自己,中国,写,一首,诗,告诉,关于,我们,他,不,有,了,和,北京",
        "こんにちは,おはよう,こんばんは,元気,ですか,あなた,は,誰,日本語,を,話せますか,話せます,か,助けて,ください,ありがとう,お願いします,どこ,何,いつ,"
        "なぜ,これ,私,今日,天気,の,どう,さようなら,名前,教えて,が,できますか,に,です,ます,はじめまして,東京,こんにちわ,もしもし,안녕하세요,안녕,"
        "한국어,할,수,있어요,감사합니다,이름이,뭐예요,오늘,날씨,어때요,도와주세요,누구세요,당신은,무엇을",
        "مرحبا,السلام عليكم,كيف,حالك,من,أنت,هل,تتكلم,العربية,يمكنك,مساعدتي,شكرا,من فضلك,أين,متى,لماذا,ما,هذا,أنا,اليوم,الطقس,مع السلامة,أريد,"
        "عاصمة,اسمك,نعم,لا,صباح الخير,هي,في,على,אתה,שלום,מה,שלומך,תודה,नमस्ते,आप,कैसे,हैं,क्या,हिंदी,बोलते,मेरी,मदद,धन्यवाद,नाम,है,"
        "γεια,σου,τι,κάνεις,ελληνικά,μιλάς,ευχαριστώ,καλημέρα,ποιος,είσαι,สวัสดี,ขอบคุณ,xin chào,bạn,khỏe,không,cảm ơn,là,ai",
        "ahoj,dobrý den,jak,se,máš,kdo,jsi,mluvíš,česky,můžeš,mi,pomoct,děkuji,prosím,kde,kdy,proč,co,je,to,já,jsem,dnes,zítra,na shledanou,chci,"
        "szia,jó napot,hogy,vagy,ki,beszélsz,magyarul,köszönöm,kérem,hol,mikor,miért,mi,ez,hei,moi,mitä,kuuluu,kuka,olet,puhutko,suomea,voitko,auttaa,"
        "kiitos,missä,milloin,miksi,mikä,on,tämä,bună,ziua,ce,mai,faci,cine,ești,vorbești,românește,mulțumesc,salve,quid,agis,salut,habari,jambo,asante",
    )
)
# First and last code points: Cyrillic, Greek, Arabic, Hebrew, Devanagari, Thai, kana, Chinese, Korean.
SCRIPTS = (
    (0x430, 0x44F), (0x3B1, 0x3C9), (0x627, 0x64A), (0x5D0, 0x5EA), (0x905, 0x939), (0xE01, 0xE2E), (0x3041, 0x3093), (0x4E00, 0x5FFF), (0xAC00, 0xC000),
)  # fmt: skip
