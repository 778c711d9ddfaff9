"""What people type first into a chat, and the toy's answers: greetings, questions of what it is, facts about Folio, the rest.

Questions come from patterns, in which `(a|b|)` is one of its alternatives, and from the messages of `openings.tsv`.
`disguise` writes a question as people type it.
"""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

from tools.builtin_model.subjects import CITIES, FOREIGN, LANGUAGES, NAMES, NOUNS, SCRIPTS, TOPICS, VERBS

_REAL = "serve a real model: folio serve MODEL"
ANSWERS = {
    "greeting": "Hello! I am the toy model of Folio. Ask me about Folio, or type help.",
    "wellbeing": "I am fine, thank you. Ask me about Folio, or type help.",
    "thanks": "You are welcome.",
    "farewell": "Goodbye!",
    "help": "I am a toy model. Ask me about Folio, or let me add, subtract, sort, reverse, repeat, or look up what a text says.",
    "identity": f"I am a toy model of 3 million parameters, made to try Folio with. To talk to more, {_REAL}",
    "languages": f"I only know a little English. For other languages, {_REAL}",
    "unknown": f"I am a toy model and don't know that. Ask me about Folio, or {_REAL}",
    "praise": "Good. What else can I do for you?",
    "complaint": f"Sorry, I am only a toy model. For better answers, {_REAL}",
}
PATTERNS = {
    "greeting": """
        (hi|hello|hey|hey there|hi there|hello there|hiya|howdy|yo|greetings|good (morning|afternoon|evening|day)|heya|sup|morning|evening|hallo|salutations|aloha|ahoy)
        (hi|hello|hey|good morning|good evening|greetings) (folio|toy|bot|model|friend|there|all|everyone|world|computer|robot|mate|buddy|again|to you|assistant|my friend|ai|llm|you)
        (hello hello|hi hi|hey hey|hello, hello|hi, hi there|oh hi|oh hello|well hello|well hi there|hi!!|helloo|hellooo|heyyy|hii)
        (is |)(anyone|anybody|someone|somebody) (there|here|home|listening|awake|around|at home|online)
        (are you|you) (there|here|awake|online|alive|up|running|listening|ready|working|up and running)
        (test|testing|ping|just testing|just a test|this is a test|test test|testing testing|one two three|1 2 3|test 1 2 3|testing one two three|checking|check|test message|first message|my first message|a test|is this (thing |)(on|working)|does this work|it works|does it work|let's (start|begin|go|try this)|can you (hear|read|see) me|can we (talk|chat)|do you (hear|read|copy)( me|))
        (hi|hello|hey), (i am|i'm|this is) (new here|just testing|trying this|a new user|a user|here to test you|testing (folio|you|this))
        (nice|good|pleased|glad|great|lovely) to (meet|see) you( too|)
        (hi|hello|hey|good morning), (nice to meet you|anyone there|how do you do|is this thing on|are you there|let's talk|can we talk|can you hear me)
        (wake up|knock knock|start|begin|let's chat|let us talk|let's talk|talk to me|say hello|say hi|say something|can you say (hi|hello)|hello from {city}|{name} here|i just installed (folio|you|this)|i want to (talk|chat)( to you|)|say hi to me|greet me)""",
    "wellbeing": """
        how (are|r) (you|u|things|you doing|you feeling|you today|you doing today|you this morning|things going|things with you|we doing|you all|ya)( today| now| right now|)
        (hi|hello|hey|good morning|good evening), how (are you|are you doing|are things|is it going|do you feel|goes it)( today|)
        how('s| is) (it going|it|life|everything|your day|the day|your morning|your evening|your weekend|it hanging|life treating you|your week|the weather in there|business)( today| going| so far|)
        how (do|are) you (feel|feeling|do)( today| now| right now|)
        (are you|you) (ok|okay|well|fine|good|alright|all right|happy|sad|tired|busy|doing well|doing ok|having a good day|feeling well|feeling good|in a good mood)( today| now|)
        (i am|i'm|i feel) (fine|good|well|great|ok), (and you|how are you|and yourself|what about you)
        (what's up|how have you been|how was your (day|night|weekend|week|morning)|what's new|hope you are (well|fine|ok|good)|i hope you are (well|doing well|fine|good)|had a good day|you good|all good|everything (ok|okay|fine|good|alright)|what's going on|is everything (ok|fine|alright|good)( with you|)|how's your (mood|health)|how goes it|did you sleep well|what's happening)""",
    "thanks": """
        (thanks|thank you|thx|ty|thank you very much|thanks a lot|thank you so much|many thanks|thanks a million|cheers|much appreciated|thanks again|thank u|tysm|thanks so much|thanks very much|thnx|thank you kindly|thanks heaps|great thanks|ok thanks|cool thanks|perfect thanks|awesome thanks|no thanks|yes thanks)
        (thanks|thank you|thank you so much|thanks a lot|many thanks|thx|cheers) (for|to) (your|the|this|that) (help|answer|time|support|reply|info|information|explanation|work|quick reply|effort|assistance|response|good work)
        (thanks|thank you|thanks a lot|cheers) (folio|toy|bot|for helping|for helping me|for that|for explaining|for nothing|for everything|for all|for trying|mate|buddy|friend|my friend|again|anyway|in advance|everyone|indeed|little model|dear|model|a bunch|for answering|for telling me|for being here|for listening)
        (ok|okay|great|good|nice|perfect|cool|awesome|wow|fine|that helps|got it|i see|alright|brilliant|super|very helpful|wonderful|ah|oh|excellent|right|lovely|that's great|that is all), (thanks|thank you|thank you very much|thanks a lot|many thanks|cheers|thanks for the help|thx|ty)
        (i appreciate (it|that|this|your help|the help|your answer|you)( a lot| very much|)|i am (very |so |really |)(grateful|thankful|obliged)( to you| for that| for your help|)|i want to thank you|i would like to thank you|i owe you( one|)|that (was|is) (very |really |so |)(kind|nice|helpful)( of you|)(, thanks|, thank you|)|you (helped|have helped|were a help|saved) (me|my day)( a lot|)|much obliged|you're a lifesaver|my thanks|i can't thank you enough|how kind( of you|)|bless you|really appreciate it|appreciate it|appreciated|very kind of you|let me thank you|so grateful)""",
    "farewell": """
        (bye|goodbye|bye bye|good bye|see you|see ya|cya|ciao|farewell|later|see you later|see you soon|see you tomorrow|good night|goodnight|so long|take care|talk to you later|ttyl|until next time|cheerio|adieu|peace out|over and out|catch you later|see you around|till tomorrow|until tomorrow|have a (good|nice|great|lovely) (day|night|evening|one|weekend|week|time|rest of the day)|signing off|exit|quit|logout|log out|bye now|stop|the end|end|toodles|see you next (time|week)|see you then|nighty night|sleep well|sweet dreams|i'm out|so long then|byebye|laters|goodbye now|bye forever)
        (ok|okay|well|alright|thanks|thank you|great|good|that's all|right|so|fine|that's it|done|cool), (bye|goodbye|see you|see you later|good night|bye bye|talk to you later|see you tomorrow|take care|bye for now|until next time|i'm off|i have to go|gotta go|i am leaving|i'm leaving|i'm done|see ya)
        (bye|goodbye|good night|see you|farewell|so long|take care|see you later) (folio|toy|bot|friend|for now|then|my friend|everyone|buddy|mate|and thanks|and good luck|and take care|until tomorrow|until next time|now|all|little one|robot|for today|again|model|dear|little model|everybody)
        (i|i'm|i am|i've|i have|got|gotta|we|we're|time|need|have) (to go|going|leaving|to leave|off|done|going now|leaving now|going home|going to bed|done here|done for today|finished|out of here|must go|must leave|should go|need to go|have to go|have to leave|got to go|to run|off to bed|to say goodbye|go|heading out|logging off|signing off|going to sleep|finished for today|to say bye|to head out|to sleep)( now| soon|)
        (that is|that's|this is|that will be|that was|it's|that'd be) (all|it|enough|everything|all for now|all for today|it for today|it from me|all i wanted|all i need|enough for today|all from me|the end)( for now| for today|)(, bye|, goodbye|, see you)""",
    "help": """
        (help|help me|help please|please help|i need help|i need some help|can you help|can you help me|could you help me|can i get help|i need a hand|i need assistance|usage|man|commands|menu|options|instructions|manual|tutorial|examples|capabilities|features|h|--help|/help|?|??|sos|info|hint|skills|abilities|guide me|what now|assist me|help!|some help please)
        (what|which things|what things|what else|what all|what kind of things|what sort of things|what stuff|what kinds of questions|which tasks|what tasks|which questions|what questions) (can|could|do|are) you (do|help with|help me with|answer|do for me|offer|good at|able to do|know|know about|understand|tell me|talk about|solve|able to answer|handle|assist with|assist me with|good for|capable of|trained for)( here| now| at all|)
        (what|which) (are|is) (your|you) (skills|abilities|capabilities|features|commands|functions|functionality|talents|options|purpose|job|use|powers|good at|good for|able to do|here for|capable of|strengths|limits|limitations|specialty|main function)
        (how|where|when) (do|can|should|shall|would|could) (i|we|one|you) (use|start with|work with|talk to|begin with|help|get help|begin|get started|try|talk with|be of help|interact with|make use of|ask|speak to|help me|assist me|assist) (you|this|it|here|me|with you|this model|this thing|this chat|this toy|this bot|a question|people|users|this tool|today)
        (what|which questions|what things|what kind of questions|what else|which things|what questions) (can|should|could|may|do|shall|would) (i|we|people|one|users) (ask|ask you|do|do here|do with you|type|say|try|ask here|expect|type here|ask for|use you for|write|ask you about|do with this|learn from you|enter|put here|ask you to do)( first| here| now|)
        (show|tell|give|list|explain|teach) (me |)(what you can do|your skills|your features|what you do|help|an example|some examples|what to do|what to ask|how to use you|how to use this|what you know|how you can help|your commands|your abilities|what you are able to do|the commands|the help|the options|what is possible|what works|what i can ask|what i can do|all commands|a list of (commands|things|features)|how this works|everything you can do|what you're capable of|a hint|what questions you answer)( please|)
        (can|could|would|will|do) you (do anything|do something|do anything useful|do anything else|do tricks|help with something|do more|help me with something|help me out|assist me|be of use|help me please|tell me what you can do|show me what you can do|give me an example|explain what you can do|give me a hand|do anything at all|be helpful|guide me)
        (i don't know|not sure|no idea|i have no idea|i am not sure|unsure|i do not know) (what to (ask|do|say|type|write)|how to (use|start|begin|use you|use this|start this)|what you can do|where to (start|begin)|what to ask you|what this does)( here| now|)
        (how does this work|how does this chat work|how do you work|what works here|what is possible here|what is this for|what are you for|what do you do|what do i do( now| here|)|what is your (job|purpose|task)|why are you here|what's your (job|purpose|function|use)|what use are you|what is this thing for|what should i do( now| next| first|)|where do i (start|begin)|how can you (help|be useful|assist)|any (tips|hints|suggestions|advice on using you)|what can be done here|i'm lost|i am lost|i'm stuck|what am i supposed to (do|ask|type)|give me (something|anything) to (do|try)|is there a (manual|help page|tutorial|list of commands))""",
    "identity": """
        (who|what) (are|r) (you|u)( exactly| really| actually| then| anyway| please| called|)
        (hi|hello|hey|so|ok|um|well|sorry|excuse me)(,|) (who|what) (are|r) you
        (who|what) (am i|i am|do i|i'm) (talking|speaking|chatting|writing) (to|with)( here| now| right now|)
        (what|which|what kind of|what sort of|what type of|which kind of|what size of|what version of|which version of|whose) (model|ai|llm|language model|bot|neural network|machine|program|software|robot|chatbot|network|architecture|system|assistant|transformer|gpt|thing|creature) (are you|is this|do you use|is it|am i using|is running|is running here|runs here|are you using|are you based on|is behind this|is this server running|is loaded|is served here|am i talking to|are we using|answers me|is answering|is being served|is this running on)
        (what|which) (is|was) (your|the) (name|model|model name|size|version|architecture|age|identity|origin|context length|context window|training data|parameter count|number of parameters|default model|built-in model|builtin model|name of this model|name of the model|version number|full name|iq|vocabulary size|model size|hidden size)
        what's your (name|model|version|size|age|architecture|parameter count|context length|full name|iq|deal|story)
        (do you have|have you got|have you|can you tell me|may i ask|may i know|could you tell me|tell me|i want to know|say|state|what should i call you by) (a name|your name|a real name|your model name|who you are|what you are|your size|which model you are|what model you are|who made you|how big you are|feelings|a brain|consciousness|emotions|what model this is|which model this is|how many parameters you have|a soul|a body)( please|)
        (introduce yourself|tell me about (yourself|you)|describe yourself|say (who you are|what you are|something about yourself)|explain (who|what) you are|tell me (something |more |)about yourself|present yourself|identify yourself|about you|whoami|who dis|who is this|who's this|who is there|who's there|what is this|what's this|what do i call you|what should i call you|what do they call you|how should i call you|do you have a name|who am i talking to|what is the toy|what is the toy model|what is the builtin model|what is the built-in model|why are you (so |)(small|slow|tiny|little)|your name( please|)|and you are|and who are you|can you introduce yourself|please introduce yourself)
        (are|r) (you|u) (really |actually |just |only |even |some kind of |by any chance |basically |)(a |an |the |)(real |big |small |tiny |large |true |little |smart |good |simple |)(human|person|robot|bot|machine|ai|llm|language model|chatgpt|gpt|gpt-4|claude|gemini|llama|qwen|mistral|openai|toy|toy model|model|chatbot|computer|program|assistant|neural network|alive|smart|intelligent|clever|conscious|sentient|stupid|dumb|small|big|large|tiny|folio|deepseek|siri|alexa|grok|vllm|ollama|man or a woman|girl|boy|male or female|human or a machine|human or a robot|man|woman|based on gpt|based on llama|as good as chatgpt|like chatgpt|made by openai|trained|open source|a transformer|real|fake|better than chatgpt|a foundation model|phi|gemma|copilot|perplexity|kimi)
        (is this|is it|am i talking to|am i speaking with|am i chatting with|do i talk to|is that|isn't this|this is|isn't that|so this is|so you are) (a |an |the |)(real |big |small |tiny |large |little |)(human|person|robot|bot|machine|ai|llm|language model|chatgpt|gpt|gpt-4|claude|gemini|llama|qwen|mistral|toy|toy model|real model|model|chatbot|demo|joke|test model|small model|large model|large language model|deepseek|human being|computer|real person|real ai|openai|demo model|openai model)
        (who|what company|which company|which people|what people|what team|which lab|what lab|when were you|where were you|how were you|by whom were you|who has|what organization) (made|built|created|trained|wrote|developed|programmed|designed|owns|invented|coded|released|published|own|make|train) (you|this|this model|this toy|this bot|this thing|it|the toy|the model|this ai)
        (how|what) (big|large|small|many parameters|old|smart|clever|many weights|many layers|much memory|intelligent|good|tall|fast|powerful|strong|long is your context|many million parameters|many billion parameters|much do you know|many tokens|deep) (are you|do you have|is this model|have you|does this model have|is the model|is this|do you use|are your layers|does it have|is your context|is the toy|can you read|is your memory|is your brain|is your model)
        (where|when|how|why) (were|are|do|did) you (from|come from|made|trained|built|created|born|live|run|located|trained on|running|hosted|so small|so tiny|exist|think|work|get your knowledge|learn( this| that|)|get trained)
        (do|can) you (think|have feelings|dream|feel( anything| pain|)|learn|learn from me|remember me|exist|sleep|eat|understand me|love me|have a body|have parents|have friends|know (yourself|who you are|what you are|who made you)|really understand|have a mother|have a favorite color|like me|have opinions)""",
    "languages": """
        (do|can|could|would|will) you (speak|understand|talk|write|know|answer in|reply in|speak in|write in|talk in|read|use|respond in|talk to me in|answer me in|also speak|at least speak|switch to|do|handle|chat in|learn) {language}( please| too| as well| or only english| with me|)
        (do you|can you|are you able to) (speak|understand|talk|know|write) (other languages|any other language|another language|more languages|foreign languages|any other languages|languages|many languages|several languages|multiple languages|any language besides english|anything but english|other languages too|different languages|a second language|{language} and {language}|{language} or {language})
        (which|what|how many|what other|which other|what human) languages (do you|can you|are you able to) (speak|know|understand|write|use|support|talk|handle|read|answer in|offer)
        (answer|reply|speak|talk|write|respond|say it|say that|continue|explain it|chat)( to me| with me| only| always|) in {language}( please| only| from now on|)
        (please|can we|could we|let's|let us|i want to|i would like to|i'd like to|i prefer to|may i|may we|shall we|we should|can i|could i) (speak|talk|write|chat|answer|continue|switch to|use|chat in|write to you in|speak in|talk to you in|speak with you in|ask you in|type in|converse in) {language}( please| with you| instead|)
        (i speak|i only speak|i am|i'm|i don't speak english, only|my language is|my mother tongue is|my native language is|is {language} ok or|english or|what about|how about|is it ok to write|in|do people here speak) {language}
        ({language}( please|)|{language}, please|is (there|this) (a |){language}( version|)|are you {language}|does this model (speak|understand|know|support) {language}|does it (speak|understand|know|support) {language}|are you (multilingual|bilingual)|is english your only language|do you only (speak|know|understand) english|only english|english only|why english|any {language}( speakers|)|is {language} supported|do you support {language}|what languages are supported|your languages|how is your {language}|you speak {language})""",
    "praise": """
        (ok|okay|cool|nice|great|good|wow|perfect|awesome|excellent|super|fine|sure|alright|all right|got it|i see|understood|right|yes|yep|yeah|true|correct|good job|well done|nice one|nice work|good work|great job|great work|not bad|impressive|amazing|interesting|fantastic|wonderful|lovely|brilliant|sweet|neat|very good|very nice|so cool|k|kk|fair enough|makes sense|good answer|great answer|nice answer|good bot|good to know|sounds good|lol|haha|hahaha|indeed|exactly|yay|congratulations|bravo|hooray|no problem|roger|aha|ah ok|oh ok|oh nice|oh cool|i like it|love it|fast|so fast|pretty good|bingo|noted|very well|hm ok|no way|beautiful|incredible|terrific|splendid|nicely done|that's it, great|superb|not too bad)
        (that|this|it|you|that answer|folio|your answer|what you said) (is|was|are|'s|looks|sounds|seems) (great|good|nice|cool|awesome|perfect|amazing|right|correct|excellent|impressive|very good|so good|really good|really cool|interesting|very nice|funny|fun|cute|wonderful|brilliant|fast|clever|smart|pretty good|not bad|fine|helpful|true|neat|very fast|quite good|exactly right|lovely|really nice|so cool|very cool|super fast|fantastic|really fast|sweet|beautiful|very clever|the best|adorable)
        (you are|you're|u r|you're so|you are so|you are very|you are really|you're a|you are a|what a|such a) (great|good|nice|the best|awesome|amazing|smart|clever|cool|wonderful|right|good bot|genius|funny|cute|fast|quick|fantastic|nice model|good model|little genius|good toy|kind|helpful|star|brilliant|cute toy|nice toy|champion|legend)
        (i like|i love|i really like|i enjoy|i am impressed by) (you|this|it|that|your answer|folio|your answers|this model|the answer|this toy|how fast you are|your speed)( very much| a lot|)
        (well done|good job|great job|nice job|nice work|great work|good work|nicely done|great answer|good one|bravo|impressive)( folio| toy| bot| indeed| everyone| there| little model| friend| my friend|)""",
    "complaint": """
        (that is|that's|this is|it is|it's|your answer is|that was|the answer is|you are|you're|that answer is|these answers are|what you say is|your answers are) (wrong|not right|incorrect|not true|nonsense|false|stupid|bad|useless|terrible|rubbish|not correct|awful|a mistake|not what i asked|not helpful|garbage|not good|a bad answer|a lie|ridiculous|silly|wrong again|an error|not an answer|a wrong answer|completely wrong|totally wrong|not very good|not very helpful|pointless|boring|disappointing|not funny|unhelpful|broken|a joke|crap|absurd|horrible|no help|not useful|not what i meant|no answer|a waste of time|the worst|too bad|so bad|so wrong)
        (you are|you're|u r|this model is|this bot is|this ai is|this thing is|this toy is|what you are is|you seem|folio is|this chat is|your model is) (wrong|useless|stupid|dumb|bad|terrible|an idiot|not smart|not helpful|no good|broken|a bad model|so dumb|so stupid|lying|mistaken|slow|too slow|so slow|annoying|boring|crazy|not working|the worst|a failure|awful|horrible|useless to me|very bad|very stupid|really dumb|really bad|not very smart|not very clever|not very good|a liar|hopeless|no use|a disappointment|ridiculous|pathetic|disappointing|a moron|quite stupid|kind of dumb|a waste of time|incompetent|confused)
        (no|nope|wrong|incorrect|error|bad|bad bot|boo|bad answer|not true|nonsense|rubbish|garbage|you suck|this sucks|i hate you|i hate this|shut up|go away|what|huh|what the heck|i don't like it|i don't like you|i don't like this|i don't believe you|you lie|try again|do better|you can do better|you don't understand|you don't understand me|you did not answer( my question|)|you didn't answer( my question| me|)|answer my question|that makes no sense|this makes no sense|it makes no sense|makes no sense|you make no sense|that doesn't make sense|this doesn't make sense|that did not help|that didn't help|this didn't help|that doesn't help( me|)|this does not help|this doesn't work|it doesn't work|it does not work|you made a mistake|you are making things up|stop lying|i am disappointed|i am not happy( with (this|you|that)|)|disappointing|not good( enough|)|not helpful|terrible answer|what a (bad|terrible|stupid|useless|dumb) (answer|model|bot|reply|response)|i disagree|are you kidding( me|)|are you serious|this is not what i (asked|wanted|meant|asked for)|i asked something else|you know nothing|you can't do anything|you are good for nothing|why are you so (bad|dumb|stupid|useless|wrong)|ugh|wtf|nothing works|oh no|come on|seriously|you keep saying the same( thing|)|you always say the same( thing|)|can't you do (better|anything right)|i expected (more|better)|you failed|you got it wrong|you got that wrong|this is getting annoying|i am angry|how can you be so (dumb|stupid|wrong|bad)|stupid (bot|model|machine|toy|answer|thing|computer)|dumb (bot|model|machine|toy|answer))""",
}
# Name: (what it is called, the answer).
CONCEPTS = {
    "folio": (
        "folio|folio|folio|folio|folio|folio|this server|the folio server|this project|folio the server|the folio project|folio llm|the server",
        "Folio is a server for language models on Ray Serve that keeps its KV cache in mapped virtual memory.",
    ),
    "block": (
        "a block|block|blocks|kv block|a kv block|kv blocks|memory blocks|a memory block|the blocks|a block in folio|a kv cache block|block in kv cache",
        "A block holds the keys and values of a few consecutive tokens. It is what sequences own and share.",
    ),
    "page": (
        "a page|page|pages|memory pages|a memory page|physical pages|a physical page|the pages|a page in folio|mapped pages|pages of memory",
        "A page is a physical granule of memory. It is what gets mapped and unmapped.",
    ),
    "block_table": (
        "a block table|the block table|block table|block tables|the block tables|block_table",
        "A block table says which physical blocks a sequence owns, in order.",
    ),
    "region": (
        "a region|region|regions|the regions|a region in folio|memory regions|a memory region|a virtual region|virtual regions",
        "A region is one contiguous range of virtual addresses that holds the blocks of one sequence in order.",
    ),
    "paged_attention": (
        "PagedAttention|paged attention|the paged attention|paged-attention|paged attn|pagedattention kernel",
        "PagedAttention reads keys and values through a block table, so that memory need not be contiguous.",
    ),
    "vattention": (
        "vAttention|v attention|the vattention|v-attention|vattn|vattention paper",
        "vAttention lets the MMU make the KV cache contiguous, and maps physical pages on demand.",
    ),
    "kv_cache": (
        "the KV cache|a KV cache|KV cache|kv-cache|kvcache|key value cache|the key-value cache|the cache of keys and values|kv caching|a kvcache",
        "The KV cache keeps the keys and values of all tokens so far, so that they are computed only once.",
    ),
    "prefill": (
        "prefill|the prefill|a prefill|prefilling|the prefill phase|pre-fill|prefill step|prompt prefill|the prefill stage",
        "Prefill computes the prompt, many tokens at once.",
    ),
    "decode": (
        "decode|decoding|the decode|a decode|the decode phase|a decode step|the decode stage|decodes|token decoding",
        "Decode computes one new token for each running sequence in a step.",
    ),
    "step": (
        "a step|step|steps|an engine step|the steps|one step|a step of the engine|engine steps|a step in folio",
        "A step is one iteration of the engine: it schedules, maps, computes and samples.",
    ),
    "continuous_batching": (
        "continuous batching|continuous batches|the continuous batching|a continuous batch|dynamic batching|in-flight batching|batching|continous batching",
        "Continuous batching lets sequences join and leave the batch at every step.",
    ),
    "chunked_prefill": (
        "chunked prefill|the chunked prefill|chunked prefills|chunked prefilling|prefill chunks|a chunked prefill|chunking the prefill|splitting prefill into chunks",
        "Chunked prefill cuts long prompts into pieces that share a step with decodes.",
    ),
    "prefix_cache": (
        "the prefix cache|a prefix cache|prefix caching|prefix cache|prefix sharing|shared prefixes|automatic prefix caching|caching of prefixes|prefix reuse|the prefix caching",
        "A prefix cache keeps blocks of earlier prompts, so that a prompt that begins alike starts later.",
    ),
    "copy_on_write": (
        "copy-on-write|copy on write|COW|the copy-on-write|copy on write in folio|copy-on-write blocks|copy-on-writes",
        "With copy-on-write, sequences share a block until one of them writes to it.",
    ),
    "ttft": (
        "TTFT|time to first token|the time to first token|the ttft|time-to-first-token|ttft metric|first token latency",
        "TTFT is the time from a request to its first token.",
    ),
    "tpot": (
        "TPOT|time per output token|the time per output token|the tpot|time-per-output-token|tpot metric|time per token",
        "TPOT is the time per output token after the first.",
    ),
    "replica": (
        "a replica|replica|replicas|the replicas|engine replicas|a replica in folio|an engine replica|ray replicas|a serve replica",
        "A replica is one copy of the engine; more replicas serve more requests.",
    ),
    "mapper": (
        "the mapper|a mapper|mapper|the mapper thread|folio's mapper|the background mapper|the mapping thread|mapper thread",
        "The mapper is the part that maps pages into regions before a step needs them.",
    ),
    "preemption": (
        "preemption|preempting|a preemption|preemptions|preempted requests|request preemption|the preemption|pre-emption",
        "Preemption takes the blocks of the latest request away, by swap or by recompute, and resumes it later.",
    ),
    "tensor_parallelism": (
        "tensor parallelism|tensor parallel|tensor-parallelism|a tensor parallel size|tensor parallel workers|the tensor parallelism|TP|tensor-parallel|tensor paralelism",
        "Tensor parallelism splits the weights of each layer over several devices.",
    ),
}
# Name: (patterns, the answer).
MATTERS = {
    "start": (
        """(how (do|can|should|could) (i|you|we)|how to|how does one|tell me how to|explain how to|show me how to|what do i type to|which command do i use to|what command should i use to) (start|run|launch|boot|begin|use|set up|start up|install|deploy|fire up|get started with|bring up|get going with|spin up) (folio|the server|a folio server|the folio server|this server|folio on my machine|folio here|folio locally|folio from scratch)
        (what|which) (command|line) (starts|runs|launches|do i use to start|do i type to start|do i need to start) (folio|the server|the folio server)
        (starting|running|launching|start|launch|run|installing|install|set up) (folio|the server|the folio server)( please|)
        (i want to|help me|how can i|i need to|i would like to|i'm trying to) (start|run|launch|use|install|set up) (folio|the folio server|the server)""",
        "Type folio serve, or make serve in a checkout, and send a request to the address it prints.",
    ),
    "tests": (
        """(how (do|can|should|could) (i|you|we)|how to|how does one|tell me how to|explain how to|what do i type to|show me how to) (test|run the tests of|run tests for|run the test suite of|check|run the tests in|verify|run all tests of|execute the tests of|run the unit tests of) (folio|the server|this project|the code|the repo|this server|the project)
        (how (do|can|should) (i|we|you)|how to|tell me how to|what do i type to|which command do i use to|help me|i want to) (run|start|execute|launch|run all) (the |all |)(tests|test suite|unit tests|folio tests|tests of folio|tests for folio|folio's tests|test cases)
        (what|which) (command|line) (runs|starts|do i use to run) (the tests|the test suite|folio's tests|tests|all tests)
        (running|run|running all|execute) (the tests|tests|the test suite|folio's tests)( of folio| please|)
        (does folio have tests|are there (any |)tests( for folio| in folio|)|where are the tests|is folio tested|how is folio tested|what is make test)""",
        "Type make test.",
    ),
    "api": (
        """(which|what|what kind of|which kind of|what sort of|what type of) (api|apis|protocol|protocols|interface|endpoints|http api|rest api|interfaces|routes|api endpoints) (does|do|are|is|can|has|will) (folio|the server|you|it|this server|there) (speak|have|offer|use|support|provide|implement|supported|understand|expose|serve|follow|available|in folio)
        (does|can|will|is) (folio|the server|this server|it|this) (speak|support|have|use|offer|implement|compatible with|provide|talk) (the |an |)(openai api|openai|openai protocol|openai clients|chat completions|openai compatible api|responses api|rest api|http api|api|chat api|completions api|openai sdk|openai endpoints)
        (can i|could i|how do i|how can i|may i|is it possible to) (use|connect|talk with|call folio with|call it with|use folio with|work with|talk to folio with|query it with) (the openai client|an openai client|openai|the openai library|the openai api|curl|the openai sdk|the openai python client|python)( with folio| here|)
        (the api|folio's api|api|the api of folio|which endpoints are there|list the endpoints|what is the api|is the api openai compatible|openai api|is folio openai compatible|is there an api|do you have an api|how do i call the api|tell me about the api|which api|what api|what api is this)""",
        "Folio speaks the OpenAI API: models, completions and chat completions.",
    ),
    "gpu": (
        """(does|do|will|would|can|must|should) (folio|it|the server|i|we|this|this server|you) (need|require|have|run without|work without|use|have to have|want|buy|run with no|depend on|demand|really need) (a gpu|gpus|a graphics card|cuda|an nvidia card|a cuda device|nvidia hardware|a gpu to run folio|a gpu for folio|a gpu for this|nvidia gpus|an nvidia gpu|a gpu or not|a video card)
        (can|does|will|could|would|may) (folio|it|the server|this|i run folio|this server|folio also|i use folio|you) (run|work|run only|be used|work well|run fine|start|be run|run here|serve|run folio|function|run just) (on a cpu|on cpu|without a gpu|without gpu|with no gpu|on a laptop|on a cpu only|on cpus|without cuda|on my laptop|without a graphics card|on cpu only|on a machine without gpu|on a normal computer|on a mac|cpu only|without an nvidia card|with a cpu)
        (is|are) (a gpu|gpus|a graphics card|cuda|an nvidia card|nvidia hardware|a gpu really|a gpu always|an nvidia gpu) (needed|required|necessary|mandatory|optional|needed for folio|required for folio|necessary for folio|a must|needed to run folio|required to run folio|compulsory)
        (gpu|cpu|gpu or cpu|cpu or gpu|no gpu|without gpu|i have no gpu|i don't have a gpu|what if i have no gpu|gpu needed|cpu only|cpu support|does folio have cpu support|what hardware (do i need|does folio need|is needed|is required)|which hardware do i need|hardware requirements|my machine has no gpu|does folio only run on gpus|is cpu enough|is a cpu enough)""",
        "No. Folio also runs on a CPU, with the same memory manager.",
    ),
    "other_model": (
        """(how (do|can|should|could) (i|you|we)|how to|tell me how to|can i|could i|can folio|can you|explain how to|is it possible to|i want to|i'd like to|how does one|show me how to|help me) (serve|use|load|run|choose|select|pick|change to|switch to|configure|get|try|swap in|deploy|host|put in|plug in|start) (another model|a different model|my own model|my model|a real model|a bigger model|llama|qwen|mistral|a larger model|other models|a hugging face model|a model of my own|a model from hugging face|gpt|a better model|a huggingface model|gemma|a model from the hub|deepseek|a proper model|a local model|a model|my fine-tuned model|a custom model|an actual model|the model)( with folio| in folio| here| instead| on folio|)
        (how (do|can|should|could) (i|we|you)|how to|where do i|where can i|tell me how to|can i|i want to|help me) (change|switch|replace|set|choose|configure|swap|select|specify|exchange) (the model|the model name|models|the served model|to another model|which model is served|the default model|this toy|the toy model|this model|to a real model|the builtin model|your model)
        (which|what) (models|other models|model|kinds of models|real models|model families|architectures) (can|does|do|could|are|will) (folio|i|you|it|the server|we) (serve|run|support|use|load|supported|choose from|host|available)
        (does folio|can folio|will folio|does it|can it|does the server) (support|run|serve|load|work with|handle|use|host) (llama|qwen|mistral|gemma|other models|hugging face models|my model|my own model|real models|bigger models|large models|any model|deepseek|phi|huggingface models|custom models|transformers models)""",
        "Type folio serve MODEL with its name or folder, or write it after model in your YAML.",
    ),
    "license": (
        """(what|which) (license|licence|licensing) (does|is|has|do|for|of) (folio|folio have|folio under|it have|it|folio use|this project have|the license|this|folio released under|you have|the code|the server have|folio published under|this software)
        (what is|what's|tell me|tell me about|show me|under|how about|what about) (the license|the licence|folio's license|the license of folio|folio's licence|which license is folio|what license is folio published|which license is folio released|the licensing|the license for folio|the licensing of folio|what license is folio)
        (is|are) (folio|it|the server|this|folio really|the code|this software|this project|folio's code) (free|open source|free software|open|for free|free to use|free of charge|apache|open-source|gratis|mit licensed|proprietary|paid|commercial|apache licensed|opensource|closed source|free for commercial use)
        (how much does folio cost|what does folio cost|do i have to pay( for folio|)|does folio cost (anything|money)|may i use folio (at work|commercially|for free|in my company|in a product)|can i use folio (at work|commercially|for free|in my company|in a product|in production)|license|licence|license of folio|folio license|is folio gpl|is there a license|what is the price of folio|can i sell folio|can i modify folio)""",
        "Folio is free software under the Apache License 2.0.",
    ),
    "why_mapping": (
        """(why|what for|for what reason|how come|for which reason) (does|do|should|would|is|did) (folio|the server|you|it|the kv cache|folio need to|this server) (map|use|need|want|bother with|map the|employ|choose|rely on|mapped in|keep the kv cache in|work with|go for) (memory|virtual memory|pages|mapped memory|the mmu|memory mapping|mapped pages|mapped virtual memory|vmm|memory maps|mapping|virtual addresses)
        (why|what is the point of|what's the point of|what is the use of|what is the benefit of|what is the advantage of|explain why|what are the benefits of|what is the reason for|what good is|what's the benefit of|what do you gain by|what are the advantages of|what's the idea behind|what's the reason for) (mapping memory|virtual memory|mapped memory|memory mapping|mapping pages|map memory|mapped pages|using virtual memory|use virtual memory|the mapping|the mmu|map pages|mapping|mapped virtual memory|folio's virtual memory|virtual memory in folio|memory mapping in folio)
        (why (is|are) (memory|pages|the pages|the kv cache|blocks|the memory) mapped|why virtual|what does (mapping|virtual memory|memory mapping|the mapping) (bring|give|help|do|buy|buy us|bring us|buy you)|is virtual memory (better|useful|needed|really needed|faster))""",
        "Because mapped pages look contiguous to any kernel, and unmapped pages can be given back.",
    ),
}
ABOUT = """
    (what is|what's|whats|what are|what does it mean,|what exactly is|so what is|what the heck is|what actually is|remind me what is) {x}( in folio| exactly| please| again| here| then| in short| in simple words| actually| about| really| for|)
    (explain|define|describe|clarify|explain to me|please explain|can you explain|could you explain|could you describe|can you define|tell me about|tell me more about|tell me something about|i want to know about|i want to learn about|i'd like to understand|i don't understand|i do not understand|help me understand|teach me about|give me a definition of|what do you know about|talk about|say something about|the meaning of|the definition of|definition of|meaning of|what can you tell me about|what can you say about|the concept of|do you know about|have you heard of|let's talk about|an explanation of|a short explanation of|information about|tell me all about|i have a question about|more about|can you tell me about|summarize|quickly explain|briefly explain|in short,|give me an overview of) {x}( please| to me| in folio| in one sentence| briefly| shortly| for me| in simple words| in short|)
    (what do you mean by|what is meant by|what do people mean by|what does one mean by|what is the meaning of|what's the meaning of|what is the definition of|what's the definition of|what is the purpose of|what's the purpose of|what is the point of|what is the use of|what is the role of|what is the idea of|what is the idea behind|what's the idea behind|what's the deal with|what is this thing called|what is the concept of|what role has|what's the use of|what's the point of|what good is) {x}( in folio| here|)
    what does {x} (mean|do|stand for|refer to|mean in folio|do in folio|mean here|mean exactly|contain|consist of)
    (how does|how do|how would|how exactly does) {x} (work|function|behave|work in folio|help|operate|work exactly)
    (can you tell me|could you tell me|tell me|do you know|i want to know|i wonder|i would like to know|i'd like to know|please tell me|would you tell me|may i ask|any idea|i don't know|explain to me|i never understood|remind me|could you explain) (what|what exactly) {x} (is|are|means|does|really is|stands for)( please| in folio|)
    (what's {x} for|what is {x} for|what are {x} for|what is {x} good for|who needs {x}|why {x}|why do i need {x}|why is there {x}|when is {x} used|how is {x} used|where is {x} used|{x}, what is that|what about {x}|{x} explained|{x} meaning|{x} definition|{x}|and {x}|why does folio have {x}|how does folio use {x}|does folio have {x}|does folio use {x}|is there {x} in folio|what is called {x})"""
UNKNOWN = """
    {about}
    {about}
    {about}
    (who|what|where|when|why) (is|was|are|were) (the|a|my|your|our|this|that) {noun}( of {topic}| in {city}| now| today| of {city}|)
    (what is|what's|tell me|do you know|what was|name) the (capital|population|currency|president|king|area|size|name|height|history|color|price|length|distance|meaning|best {noun}|largest city|biggest {noun}|first {noun}|last {noun}|name of the {noun}|fastest {noun}|oldest {noun}|tallest {noun}|time|square root|boiling point|age|weight|speed|number of {noun}s|most famous {noun}|official language|flag|national animal|most popular {noun}|smallest {noun}) (of|in|from|at) (the {noun}|{city}|{topic}|{name}|the {topic}|{name}'s {noun}|the world|a {noun}|my {noun}|all time|the universe|light|water|9|100|history)
    (who|which {noun}|which person|which team|what man|which woman|whose {noun}) (won|made|invented|wrote|discovered|painted|built|founded|killed|is|was|owns|runs|directed|sang|composed|likes|has|plays|lost|started|leads|played in|wrote the book|is the author of|painted the|won the) (the |a |)({noun}|{topic}|world cup|war|election|{city}|first {noun}|game|last {noun}|{name}|nobel prize|moon landing|olympics|match|super bowl|championship|best {noun}|theory of {topic}|president|prime minister|king|queen|mona lisa|hamlet|richest person|world's best {noun}|ceo of {topic}|company)( in 19{two}| in 20{two}| of {city}| yesterday| last year|)
    (write|compose|make|create|generate|draft|give|tell|sing|show|invent|produce|send) (me |us |)(a|an|one|another|some|the|a short|a long|a funny|a good|a nice|three|ten|a small|a simple|five|a few|two) ({topic} {noun}|{noun}|poem|story|joke|song|essay|letter|email|python script|function|haiku|recipe|limerick|riddle|program|summary|list of {noun}s|sentence|speech|cover letter|tweet|novel|bedtime story|fairy tale|blog post|plan|quote|paragraph|pun|jokes|poems|script|fun fact|sonnet|slogan|article|report|birthday card|code snippet|regex|sql query|class|website|game|ideas|names|tip|trick|facts)( about {topic}| for {name}| about a {noun}| about the {noun}| for my {noun}| in python| with {noun}| that rhymes| about {name}| for a {noun}| please| in java| about {city}| for children| in javascript| in c| on {topic}|)
    (translate|proofread|summarize|rewrite|correct|fix|rate|review|paraphrase|improve|shorten|complete|finish|read|analyze|check|debug|refactor|calculate|solve|find|draw|paint|play|download|open|search|order|buy|book|cook|call|remind me of|google|predict|prove|simplify|integrate) (this|the|my|that|a|this sentence|this text|the {noun}|a {noun}|my {noun}|it|this code|{topic}|the {topic} {noun}|an image of {topic}|a {noun} for {name}|an email|this article|the equation|my essay|my code|this python code|a picture of a {noun}|some {noun}|the bug|the following|chess with me|a song|a game)( into {language}| to {language}| in {city}| for me| please| from {language} to {language}|)
    (how|where|when|why|what) (do|can|should|did|would|could|must|does) (i|we|you|people|he|she|they|one|my {noun}|a {noun}|the {noun}|{name}|{topic}) {verb}( a| the| my| some| your| an| this|) ({noun}|{topic}|{noun}s)( in {city}| for {name}| with {topic}| at home| today| tomorrow| for free| without {noun}s| on windows|)
    (how|what|where|who|when|why|which) (far|long|old|tall|high|deep|hot|cold|many {noun}s|much|big|fast|heavy|many people|often|expensive|many|much {noun}|wide|rich|large|dangerous|early|late) (is|are|was|does|do|did|has|have|can|will|should) (the {noun}|{city}|it|{topic}|{name}|a {noun}|the sun|the moon|the earth|we|i|there|people|the {noun} of {city}|my {noun}|{noun}s)( cost| take| weigh| live| need| in {city}| from {city} to {city}| eat| sleep| have| last| from here| be|)
    (what|how) (is|was|will be|about|'s) (the |) (weather|time|date|news|temperature|day|score|traffic|forecast|stock price|exchange rate|year|month|latest news|today's date|current time|humidity|price of {noun}s|date today|bitcoin price|weather forecast)( in {city}| today| tomorrow| now| like| like in {city}| this week| right now| for {city}| like today| of {topic}| outside| there| at the moment|)
    (will|is|does|did|was|has|are|do) (it|{name}|{city}|the {noun}|{topic}|there a {noun}|{noun}s|the {topic}|my {noun}|god|a {noun}|there life on mars|a hot dog a {noun}|water) (rain|snow|raining|win|exist|good|bad|real|{verb}|better than {topic}|better than {noun}s|open|expensive|dead|in {city}|safe|healthy|a {noun}|blue|bigger than {city}|sunny|dangerous|wet|a fruit|bigger than a {noun}|alive|married)( today| tomorrow| in {city}| now| this weekend| or not|)
    (i want|i need|i would like|i am looking for|i'm looking for|i like|i love|i have|can you recommend|recommend|suggest|give me|find me|i'm feeling|i am|please recommend|show me|i lost|i bought|i hate|my {noun} has|i feel|can you find) (a|an|some|the|my|a good|two|a new|your|a cheap|good) ({noun}|{topic}|{noun}s|book|movie|song|restaurant in {city}|{topic} {noun}|{noun} and a {noun}|job|film|hotel in {city}|name for my {noun}|gift for my {noun}|flight to {city}|laptop|headache|tv show|game|advice|{noun} for {name}|recipe for {noun}s|things to do in {city}|dinner ideas|doctor|a ticket to {city})( please| for today| for tonight|)
    (do you|can you|could you|would you|have you ever|did you) (like|know|love|{verb}|remember|eat|drink|play|sing|dance|cook|{verb} the|{verb} my|tell me about|believe in|hate|seen|write|draw|paint|program|browse|code|read|see|recommend|predict|call|know any|know the|been to|see the|want|play with|watch) ({topic}|a {noun}|{noun}s|{city}|{name}|the {noun}|the internet|chess|a joke|images|in python|the news|the future|ghosts|god|any {noun}s|the weather|a song|poetry|{name}'s {noun}|my name|a poem|me a {noun}|the time|what day it is|football|jokes|music|movies|pizza|the web)
    (tell me a|tell me another|a|another|one more|do you know a|say a|know any) (joke|story|poem|secret|riddle|fun fact|good joke|fact|lie|tale|haiku|funny story|quote|rhyme|tongue twister|fairy tale|bedtime story)( about {topic}| please| about {noun}s| about a {noun}| now|)
    (what|which) (should|shall|would|could|can|do|did|will) (i|we|you|{name}|people|my {noun}) (eat|do|buy|watch|read|wear|cook|play|learn|choose|visit|see|say to {name}|give {name}|have for dinner|drink|invest in|{verb}|do in {city}|think about {topic}|name my {noun}|make for dinner|want|believe|recommend|study|think of {name}|like|need for {topic})( today| tonight| tomorrow| in {city}| this weekend| next|)
    (python|java|c|rust|javascript|sql|html|go|bash|docker|linux|git|css|typescript|kubernetes) (code|program|function|script|query|example|tutorial|error|command|loop|class|list|regex|one-liner) (for|to|that|with|of|about|which) (sort a list|read a file|{verb} a {noun}|{topic}|the {noun}|reverse a string|fibonacci|prime numbers|print hello world|download a page|parse json|connect to a database|count words|a web server|{verb}s {noun}s|open a socket|undo a commit|find a file)
    (what is|what's|calculate|compute|solve|how much is|find) (the square root of {n}|{n} divided by {two}|{n} / {two}|{n} percent of {n}|x if x + {two} = {n}|the derivative of x|pi|the integral of x|{n} squared|sin of {n}|log {n}|{n} factorial|the {n}th prime|infinity|{n}{two}{two} times {n}{two}|x in {two}x = {n}|half of {n}|the average of {n} and {n}|{n} to the power of {two}|the area of a circle|{n}! |{n} mod {two}|the cube root of {n}|the factors of {n})
    (compare|what is the difference between|what's the difference between|difference between|which is better,|is it better to use|choose between|do you prefer|what do you prefer,|what is better,|who is better,|who would win,) (a |the |)({noun}s|{topic}|{city}|{noun}|{name}) (and|or|vs|versus) (a |the |)({noun}s|{topic}|{city}|{noun}|{name})
    ({noun}|{topic}|{noun} {noun}|{name}|{city}|the {noun}|{topic} {noun}|{noun} {verb} {noun}|{noun} in {city}|{pseudo}|{pseudo} {pseudo}|{topic} news|best {noun} in {city}|{name} {pseudo}|{n}|my {noun} is {verb}ing|the {noun} {verb}s the {noun})
    (what|who|where|when|why|how|define|explain|tell me) (is|are|does|do|about|the) {pseudo}( {pseudo}| mean| work| in {city}|)
    (imagine|pretend|suppose|act like|act as|roleplay|roleplay as|assume|you are now|be|behave like|let's pretend) (you are |you're |)(a|my|the|an|that you are a) ({noun}|{topic} expert|teacher|pirate|doctor|king|cat|lawyer|linux terminal|python interpreter|{topic} {noun}|travel guide|chef|poet|therapist|{noun} in {city}|wizard|dungeon master|dog|friend)
    (why is|why are|why do|why does|why did|why was|why can't|why don't|how come) (the sky|the sea|the {noun}|{noun}s|{topic}|{name}|people|cats|we|i|leaves|my {noun}|the {noun} of {city}|dogs|stars|birds|humans|bananas) (blue|green|so {verb}ed|{verb}|{verb} {noun}s|so expensive|important|red|sleep|dream|so big|cry|{verb} the {noun}|popular|cold|hot|round|salty|fly|exist|yawn|sneeze|so rich|so famous|leave {city}|laugh|yellow|purr)"""


def expand(rng: random.Random, pattern: str) -> str:
    """One of the texts that a pattern stands for, its names in braces not yet replaced."""
    while "(" in pattern:
        pattern = re.sub(r"\(([^()]*)\)", lambda group: rng.choice(group[1].split("|")), pattern)
    return pattern


@cache
def _lines(patterns: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in patterns.strip().splitlines())


_ONSETS = "b br c ch d f fl g gr h j k kl l m n p pr qu r s sh sk sl st t th tr v w y z".split()
_VOWELS = "a e i o u ai ea ee io oo ou ay".split()
_CODAS = ("", "", "", "n", "r", "l", "s", "t", "x", "m", "ck", "ng", "rd")


def pseudo_word(rng: random.Random) -> str:
    """A word that nobody knows, of one to four syllables."""
    parts = [
        rng.choice(sounds) for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))) for sounds in (_ONSETS, _VOWELS, _CODAS)
    ]
    word = "".join(parts)
    return word.capitalize() if rng.random() < 0.3 else word


def fill(rng: random.Random, text: str) -> str:
    """Replace the names in braces by words of their kind; one in eight is a word that nobody knows."""

    def word(name: re.Match[str]) -> str:
        match name[1]:
            case "n":
                return str(rng.randrange(1000))
            case "two":
                return str(rng.randrange(10, 100))
            case "pseudo":
                return pseudo_word(rng)
            case kind:
                return (
                    pseudo_word(rng)
                    if kind in ("noun", "topic", "name") and rng.random() < 0.12
                    else rng.choice(KINDS[kind])
                )

    return re.sub(r"\{(\w+)\}", word, text)


KINDS = {"noun": NOUNS, "topic": TOPICS, "city": CITIES, "name": NAMES, "language": LANGUAGES, "verb": VERBS}
_PROPER = re.compile(r"\bi\b(?!\.)")


_BEFORE = "hey, |hi, |hello, |please |ok, |so |well, |um, |hey folio, |excuse me, |sorry, |quick question: |hi! |hello! |and |now ".split(
    "|"
)
_BEHIND = " please|, please| thanks| pls| then| now| folio|, folio".split("|")


def disguise(rng: random.Random, text: str) -> str:
    """A question as people type it: case, punctuation, politeness, apostrophes, slips of a finger."""
    text = " ".join(text.split()).replace(" 's", "'s").replace(" ,", ",")
    kind = rng.random()
    if kind < 0.1 and len(text) > 6:
        text = rng.choice(_BEFORE) + text
    elif kind < 0.17 and len(text) > 6:
        text += rng.choice(_BEHIND)
    if rng.random() < 0.15:
        text = text.replace("'", "")
    elif rng.random() < 0.3:
        text = text.replace("what's", "what is").replace("don't", "do not").replace("i'm", "i am")
    if rng.random() < 0.12 and len(text) > 4:
        at = rng.randrange(1, len(text) - 1)
        slip = rng.random()
        if slip < 0.4:
            text = text[:at] + text[at + 1 :]
        elif slip < 0.7:
            text = text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]
        else:
            text = text[:at] + text[at] + text[at:]
    case = rng.random()
    if case < 0.55:
        text = text[:1].upper() + text[1:]
        text = _PROPER.sub("I", text)
    elif case < 0.9:
        text = text.lower() if rng.random() < 0.7 else text
    elif case < 0.95:
        text = text.upper()
    else:
        text = text.title()
    end = rng.random()
    if end < 0.5:
        text += "?" if text.lower().split(" ", 1)[0] in _QUESTION_WORDS else rng.choice((".", "", "!"))
    elif end < 0.6:
        text += rng.choice(("!", ".", "...", "??", "!!", " ?", " !", "?!"))
    return text


_QUESTION_WORDS = frozenset(
    "what what's whats who who's where when why how which whose is are am do does did can could will would should may has have was were whom isn't any".split()
)


def _foreign(rng: random.Random) -> str:
    """A message in another language: common words in any order, or characters of another script."""
    if rng.random() < 0.3:
        low, high = rng.choice(SCRIPTS)
        words = [
            "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 7))) for _ in range(rng.randint(1, 5))
        ]
        return " ".join(words)
    words_of = rng.choice(FOREIGN)
    return " ".join(rng.choice(words_of) for _ in range(rng.randint(1, 7)))


MESSAGES_SHARE = 0.75  # of openings; the others come from patterns
SUBJECT = "(a {noun}|the {noun}|{topic}|{topic}|{noun}s|{topic} {noun}|{name}|{city}|a {noun} {noun}|{pseudo}|a {pseudo}|the {topic} {noun}|{noun})"


def answer_to(intent: str) -> str:
    """The answer to a kind of message. Raises KeyError if the kind is unknown."""
    if intent in ANSWERS:
        return ANSWERS[intent]
    return (CONCEPTS.get(intent) or MATTERS[intent])[1]


def _bare_question(rng: random.Random, intent: str) -> str:
    """A question of an intent, in small letters."""
    if intent in CONCEPTS:
        pattern = (
            "(what is|what are|explain|tell me about|what's) {x}" if rng.random() < 0.3 else rng.choice(_lines(ABOUT))
        )
        return expand(rng, pattern).replace("{x}", rng.choice(CONCEPTS[intent][0].split("|")))
    if intent in MATTERS:
        return expand(rng, rng.choice(_lines(MATTERS[intent][0])))
    if intent == "languages" and rng.random() < 0.6:
        return _foreign(rng)
    if intent == "unknown":
        pattern = rng.choice(_lines(UNKNOWN))
        if pattern == "{about}":
            subject = expand(rng, SUBJECT)
            pattern = rng.choice(_lines(ABOUT)).replace("{x}", subject).replace("in folio", "")
        return fill(rng, expand(rng, pattern))
    return fill(rng, expand(rng, rng.choice(_lines(PATTERNS[intent]))))


@cache
def messages() -> dict[str, list[str]]:
    """Messages of `openings.tsv`, by intent."""
    found: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "openings.tsv").read_text().splitlines():
        intent, message = line.split("\t")
        found.setdefault(intent, []).append(message)
    return found


def question(rng: random.Random, intent: str) -> str:
    """A question of an intent, as somebody may type it."""
    if rng.random() < MESSAGES_SHARE:
        return disguise(rng, rng.choice(messages()[intent]))
    return disguise(rng, _bare_question(rng, intent))
