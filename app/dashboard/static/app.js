// The page: takes a state each second and shows it.
import { Chart, charts, recolour } from "./charts.js";
import { BlockMap, COLOURED, blocksOf, drawMini, drawRegion, readColours } from "./map.js";
import { GpuTable, ModelTable } from "./models.js";
import { Playground } from "./playground.js";
import { Movement } from "./stall.js";
import { States, keepKey } from "./stream.js";

const $ = (id) => document.getElementById(id);
const MEANING = {
  unbacked: "no page: the memory is the machine's", free: "has a page, no content", active: "one sequence owns it",
  shared: "several sequences own it", pinned: "of a pinned prefix", cached: "no owner; content kept for the next prompt",
  parked: "no owner; still mapped in a region", moving: "being mapped now", swapped: "copied to host memory",
};
const HISTORY = 600, FEW = 4;
let arrived = () => {}, state = null, chosen = null, hovered = null, maps = [], shown = null;
const histories = new Map(), common = { tokens: [], ttft: [], tpot: [], queue: [] }, fields = new Map();

// ---- formats ----

const number = (v) => (v >= 1e6 ? (v / 1e6).toFixed(1) + "M" : v >= 1e4 ? (v / 1e3).toFixed(1) + "k" : v >= 100 || Number.isInteger(v) ? v.toFixed(0) : v.toFixed(1));
const bytes = (v) => { let i = 0; while (v >= 1024 && i < 4) { v /= 1024; i++; } return (v >= 100 || i === 0 ? v.toFixed(0) : v.toFixed(1)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][i]; };
const seconds = (v) => (v == null ? "–" : v >= 10 ? v.toFixed(0) + " s" : v >= 1 ? v.toFixed(2) + " s" : v >= 0.01 ? (v * 1e3).toFixed(0) + " ms" : v > 0 ? (v * 1e3).toFixed(1) + " ms" : "0");
const percent = (v) => (v * 100).toFixed(0) + " %";
const ago = (v) => (v < 60 ? v.toFixed(0) + " s" : v < 3600 ? (v / 60).toFixed(0) + " min" : (v / 3600).toFixed(1) + " h");
const short = (id) => id.replace(/^(chatcmpl|cmpl|resp)[-_]/, "").slice(0, 8);
const element = (tag, className, text) => { const e = document.createElement(tag); if (className) e.className = className; if (text != null) e.textContent = text; return e; };

function tip(text, at) {
  const box = $("tip");
  box.hidden = text == null;
  if (text == null) return;
  box.textContent = text;
  box.style.left = Math.max(4, Math.min(at.clientX + 14, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top = Math.min(at.clientY + 16, innerHeight - box.offsetHeight - 8) + "px";
}

// ---- charts ----

const memoryChart = new Chart("chart-memory", [
  { label: "budget", colour: "soft", dash: [4, 4] }, { label: "free", colour: "free", fill: true }, { label: "parked", colour: "parked", fill: true },
  { label: "cached", colour: "cached", fill: true }, { label: "pinned", colour: "pinned", fill: true }, { label: "in use", colour: "active", fill: true },
  { label: "swapped", colour: "swapped" },
], { stacked: true, format: bytes, floor: 1 << 20, height: ([, , ...held]) => Math.max(held.slice(0, -1).reduce((a, b) => a + b), held.at(-1)), increments: Array.from({ length: 40 }, (_, i) => 2 ** (i + 10)) });
const mappingChart = new Chart("chart-mapping", [{ label: "steps waited", colour: "bad", fill: true }, { label: "hidden", colour: "cached", fill: true }], { stacked: true, format: seconds, floor: 0.001 });
const batchChart = new Chart("chart-batch", [{ label: "batch", colour: "active", fill: true }, { label: "waiting", colour: "pinned" }], { format: number, floor: 4, steps: true });
const stepChart = new Chart("chart-steps", [{ label: "longest", colour: "shared", fill: true }], { format: seconds, floor: 0.005, steps: true });
const hitChart = new Chart("chart-hits", [{ label: "hits", colour: "cached", fill: true }], { format: percent, most: 1 });
const tokenChart = new Chart("chart-tokens", [{ label: "generated", colour: "active", fill: true }, { label: "prompts", colour: "cached" }], { format: number, floor: 10 });
const quantiles = [{ label: "p99", colour: "bad" }, { label: "p90", colour: "pinned" }, { label: "p50", colour: "active" }];
const ttftChart = new Chart("chart-ttft", quantiles, { format: seconds, floor: 0.05 });
const tpotChart = new Chart("chart-tpot", quantiles, { format: seconds, floor: 0.01 });

// Polls may be late, and clocks of ingresses differ, but uPlot needs times in order.
function push(rows, row) { row[0] = Math.max(row[0], rows.at(-1)?.[0] ?? 0); rows.push(row); if (rows.length > HISTORY) rows.shift(); }

function record(now) {
  let outputs = 0, prompts = 0;
  for (const replica of now.replicas) {
    let of = histories.get(replica.name);
    if (!of) histories.set(replica.name, (of = { memory: [], mapping: [], steps: [], hits: [], last: null, at: 0, recent: [] }));
    const s = replica.steps;
    s.ago_s.forEach((t, i) => push(of.steps, [now.at - t, s.sequences[i], s.waiting[i], s.step_ms[i] / 1e3]));
    if (!s.num.length) push(of.steps, [now.at, 0, replica.load.num_waiting, 0]);
    const made = s.outputs.reduce((a, b) => a + b, 0), computed = s.tokens.reduce((a, b) => a + b, 0);
    of.recent = [...of.recent.filter(([t]) => t > now.at - 3), [now.at, made, computed]];
    const span = Math.max(now.at - (of.begun ??= now.at - now.period_s), now.period_s), time = Math.min(span, 3);
    of.tokensPerS = of.recent.reduce((a, [, n]) => a + n, 0) / time;
    outputs += of.tokensPerS;
    prompts += Math.max(of.recent.reduce((a, [, n, c]) => a + Math.max(c - n, 0), 0) / time, 0);
    const m = replica.memory;
    if (!m) continue;
    const used = m.active_bytes - m.pinned_bytes, free = Math.max(m.physical_bytes - m.active_bytes - m.cached_bytes - m.parked_bytes, 0);
    push(of.memory, [now.at, m.budget_bytes, free, m.parked_bytes, m.cached_bytes, m.pinned_bytes, used, m.swapped_bytes]);
    if (of.last) {
      const dt = Math.max(now.at - of.at, 0.05), queried = m.queried_tokens - of.last.queried_tokens, hits = m.hit_tokens - of.last.hit_tokens;
      push(of.mapping, [now.at, Math.max(m.exposed_us - of.last.exposed_us, 0) / 1e6 / dt, Math.max(m.hidden_us - of.last.hidden_us, 0) / 1e6 / dt]);
      push(of.hits, [now.at, queried > 0 ? hits / queried : of.hits.at(-1)?.[1] ?? 0]);
    }
    Object.assign(of, { last: m, at: now.at });
  }
  for (const name of histories.keys()) if (!now.replicas.some((r) => r.name === name) && now.events.some((e) => e.replica === name && e.kind === "went")) histories.delete(name);
  common.queue = [...common.queue.filter(([t]) => t > now.at - 60), [now.at, now.replicas.flatMap((r) => r.steps.queue_s ?? [])]];
  const { ttft_s: first, tpot_s: token } = now.traffic;
  push(common.tokens, [now.at, outputs, prompts]);
  push(common.ttft, [now.at, first.p99, first.p90, first.p50]);
  push(common.tpot, [now.at, token.p99, token.p90, token.p50]);
}

// ---- parts ----

const deviceTables = [new ModelTable($("models-panel"), { bytes, seconds }), new GpuTable($("gpu-panel"), { bytes })];
const modelChoice = $("model-choice").querySelector("select");
const replicaOf = (now) => now.replicas.find((r) => r.name === chosen);

function quantile(values, share) { const sorted = [...values].sort((a, b) => a - b); return sorted[Math.min(Math.floor(sorted.length * share), sorted.length - 1)]; }

function figures(now) {
  const t = now.traffic, sum = (f) => now.replicas.reduce((a, r) => a + (r.memory ? f(r.memory) : 0), 0);
  const running = now.replicas.reduce((a, r) => a + r.load.num_running, 0), waiting = now.replicas.reduce((a, r) => a + r.load.num_waiting, 0);
  const hit = t.prompt_tokens ? percent(t.cached_tokens / t.prompt_tokens) : "–";
  const queue = common.queue.flatMap(([, times]) => times);
  const draining = now.replicas.filter((r) => r.is_draining).length;
  const others = [draining && `${draining} draining`, now.num_starting && `${now.num_starting} starting`, now.num_silent && `${now.num_silent} silent`].filter(Boolean).join(", ");
  const list = [
    ["tokens per second", number(common.tokens.at(-1)[1]), ""], ["running, waiting", `${running}`, ` / ${waiting}`],
    ["KV memory of budget", bytes(sum((m) => m.physical_bytes)), " / " + bytes(sum((m) => m.budget_bytes))],
    ["first token, p50 / p99", seconds(t.ttft_s.p50), " / " + seconds(t.ttft_s.p99)], ["per token, p50 / p99", seconds(t.tpot_s.p50), " / " + seconds(t.tpot_s.p99)],
    ["requests per second", number(t.requests_per_s), t.failed_per_s ? ` (${number(t.failed_per_s)} failed)` : ""],
    ["end to end, p50 / p99", seconds(t.whole_s.p50), " / " + seconds(t.whole_s.p99)], ["queue, p50 / p99", seconds(quantile(queue, 0.5)), " / " + seconds(quantile(queue, 0.99))],
    ["prefix hits, last minute", hit, ""], ["went on elsewhere, last minute", `${now.num_continued}`, ""], ["replicas", `${now.replicas.length}`, others ? " " + others : ""],
  ];
  for (const [label, value, rest] of list) {
    let [strong, small] = fields.get(label) ?? [];
    if (!strong) {
      const box = element("div", "figure"), b = element("b");
      strong = document.createTextNode("");
      small = element("small");
      b.append(strong, small);
      box.append(b, element("span", "", label));
      $("figures").append(box);
      fields.set(label, [strong, small]);
    }
    if (strong.data !== value) strong.data = value;
    if (small.textContent !== rest) small.textContent = rest;
  }
}

const cards = new Map();
function card(name) {
  const box = element("button", "replica");
  box.type = "button";
  box.setAttribute("role", "option");
  const parts = { box, name: element("span"), age: element("small"), canvas: element("canvas"), left: element("span"), right: element("span"), memory: element("span"), rate: element("span") };
  const title = element("span", "name"), first = element("span", "line"), second = element("span", "line");
  title.append(parts.name, parts.age);
  first.append(parts.left, parts.right);
  second.append(parts.memory, parts.rate);
  box.append(title, parts.canvas, first, second);
  box.addEventListener("click", () => choose(name));
  cards.set(name, parts);
  return parts;
}

/** Names of the replicas whose latest event is "silent". */
const silentOnes = (now) => new Set(now.events.filter((e, i) => e.kind === "silent" && now.events.findIndex((o) => o.replica === e.replica) === i).map((e) => e.replica));

function replicas(now) {
  const silent = silentOnes(now);
  const names = new Set([...now.replicas.map((r) => r.name), ...silent]);
  for (const [name, parts] of cards) if (!names.has(name)) { parts.box.remove(); cards.delete(name); }
  for (const name of silent) cards.get(name)?.box.classList.add("silent");
  now.replicas.forEach((r, i) => {
    const parts = cards.get(r.name) ?? card(r.name);
    if ($("replicas").children[i] !== parts.box) $("replicas").insertBefore(parts.box, $("replicas").children[i] ?? null);
    parts.box.classList.remove("silent");
    parts.box.setAttribute("aria-selected", r.name === chosen);
    parts.name.textContent = r.name;
    parts.age.textContent = r.is_draining ? "draining" : ago(r.age_s);
    drawMini(parts.canvas, r.maps[0], now.states);
    parts.left.textContent = `${r.load.num_running} running`;
    parts.right.textContent = r.load.num_waiting ? `${r.load.num_waiting} waiting` : "";
    parts.memory.textContent = r.memory ? bytes(r.memory.physical_bytes) : "busy";
    parts.rate.textContent = `${number(histories.get(r.name)?.tokensPerS ?? 0)} tok/s`;
    parts.box.setAttribute("aria-label", `Replica ${r.name}: ${parts.left.textContent}, ${parts.memory.textContent} of KV memory, ${parts.rate.textContent}`);
  });
}

/** The playground's answer, whose blocks are outlined: while it runs, and 5 s longer, while they are cached. */
function followed() {
  const answer = playground.answer;
  if (!answer || answer.replica !== chosen) return null;
  if (answer.endedAt && performance.now() - answer.endedAt > 5000) return null;
  return answer;
}

function blocks(now) {
  const replica = replicaOf(now), detail = now.details[chosen];
  const source = detail?.maps.length ? detail.maps : replica?.maps ?? [];
  for (const e of document.querySelectorAll(".chosen")) e.textContent = chosen;
  if (replica?.models.length) $("blocks-title").lastChild.textContent = replica.model ? `${chosen}: ${replica.model}` : `${chosen}: no model has been loaded yet`;
  if (!source.length) return;
  const mine = followed(), owners = source.map(() => new Map()), marked = source.map(() => new Set());
  for (const s of detail?.sequences ?? []) for (const t of s.tables) for (const id of blocksOf(t)) {
    const before = owners[t.group].get(id);
    owners[t.group].set(id, before ? `${before}, ${short(s.request_id)}` : `of ${short(s.request_id)}`);
    if (mine && mine.request === s.request_id) (mine.blocks[t.group] ??= new Set()).add(id);
  }
  if (mine) for (const [g, ids] of Object.entries(mine.blocks)) marked[g] = ids;
  while (maps.length < source.length) maps.push(new BlockMap($("maps"), tip, (id) => { hovered = id; if (state) regions(state); }));
  while (maps.length > source.length) maps.pop().box.remove();
  source.forEach((map, g) => maps[g].show(map, now.states, marked[g], owners[g]));
  const map = source[0], per = map.blocks_per_cell, behind = map.num_blocks - map.shown_blocks;
  $("blocks-note").textContent = `${per === 1 ? "A square is one block:" : `A square is ${per} blocks, stacked by state; a block holds`} the keys and values of ${map.block_tokens} tokens, ${bytes(map.block_bytes)}` +
    `${source.length > 1 ? `, one map for each of ${source.length} groups of layers` : ""}. ${behind ? `${behind.toLocaleString("en")} more blocks have no page.` : ""}` + (mine ? " Outlined: your request's." : "");
  const totals = {};
  for (const m of source) for (const [name, n] of Object.entries(m.counts)) totals[name] = (totals[name] ?? 0) + n;
  for (const name of COLOURED) {
    let item = $("legend-" + name);
    if (!item) {
      item = element("li");
      item.id = "legend-" + name;
      item.title = MEANING[name];
      item.append(element("span", `swatch ${name} s-${name}`), element("span", "", name === "unbacked" ? "no page" : name), element("b"));
      $("legend").append(item);
    }
    item.lastChild.textContent = (totals[name] ?? 0).toLocaleString("en");
  }
}

function regions(now) {
  const detail = now.details[chosen], box = $("regions");
  if (!detail) return;
  const rows = [], mine = followed();
  for (const s of detail.sequences) for (const t of s.tables) {
    if (!detail.region_blocks[t.group] && detail.region_blocks.length > 1) continue;
    rows.push({ key: `${s.request_id} ${s.index} ${t.group}`, s, t, map: detail.maps[t.group], extent: detail.region_blocks[t.group] || t.num_blocks });
  }
  rows.sort((a, b) => Boolean(mine && b.s.request_id === mine.request) - Boolean(mine && a.s.request_id === mine.request) || b.s.num_tokens - a.s.num_tokens);
  for (const p of detail.parked) rows.push({ key: `parked ${p.group} ${p.slot}`, p, map: detail.maps[p.group], extent: detail.region_blocks[p.group] });
  const longest = Math.max(24, ...rows.map((r) => Math.max(r.t?.num_blocks ?? 0, r.t?.num_mapped ?? r.p?.num_mapped ?? 0)));
  const scale = 2 ** Math.ceil(Math.log2(longest * 1.05));
  const known = new Map([...box.querySelectorAll(".region")].map((row) => [row.dataset.key, row]));
  box.querySelector(".empty")?.remove();
  if (!rows.length) box.append(element("p", "empty", "No request runs, and no region is kept. Ask the model something, and pages appear here."));
  for (const [place, r] of rows.entries()) {
    let row = known.get(r.key);
    known.delete(r.key);
    if (!row) {
      row = element("div", "region");
      row.dataset.key = r.key;
      row.append(element("span", "who"), element("canvas"));
      row.firstChild.append(document.createTextNode(""), element("small"));
    }
    if (box.children[place] !== row) box.insertBefore(row, box.children[place] ?? null);
    const [title, small] = row.firstChild.childNodes, tokens = r.map.block_tokens, isMine = mine && r.s?.request_id === mine.request;
    row.classList.toggle("mine", Boolean(isMine));
    const ids = r.t ? blocksOf(r.t) : [], cells = r.map.blocks_per_cell === 1 ? maps[r.map.group]?.cells : null;
    const places = ids.map((id) => ({ id, state: now.states[cells?.[id - 1] ?? 2] }));
    if (r.t) {
      title.data = isMine ? "your request" : `${short(r.s.request_id)}${r.s.index ? " #" + r.s.index : ""}`;
      const where = r.t.slot == null ? "by block table" : `of ${(r.extent * tokens).toLocaleString("en")}`;
      small.textContent = `${r.s.num_tokens.toLocaleString("en")} tokens ${where}${r.s.num_cached_tokens ? `, ${r.s.num_cached_tokens} cached` : ""}`;
    } else {
      title.data = "kept for the next request";
      small.textContent = `${(r.p.num_mapped * tokens).toLocaleString("en")} tokens mapped`;
    }
    const mapped = r.t ? r.t.num_mapped : r.p.num_mapped, isTable = r.t && r.t.slot == null;
    drawRegion(row.lastChild, { places, mapped, extent: isTable ? places.length || 1 : r.extent, scale, cachedPlaces: Math.floor((r.s?.num_cached_tokens ?? 0) / tokens), hover: hovered });
    row.lastChild.setAttribute("role", "img");
    row.lastChild.setAttribute("aria-label", `${title.data}: ${mapped || places.length} of ${r.extent} places have a page`);
  }
  for (const row of known.values()) row.remove();
}

$("regions").addEventListener("pointermove", (event) => {
  const row = event.target.closest?.(".region");
  if (!row || event.target.tagName !== "CANVAS" || !state?.details[chosen]) return tip(null);
  tip(row.lastChild.getAttribute("aria-label"), event);
});
$("regions").addEventListener("pointerleave", () => tip(null));

function lists(now) {
  $("decisions-note").textContent = now.decisions.length ? "Each request goes where it costs least: expected wait, plus harm to others." : "Requests that arrive while you watch appear here.";
  $("decisions").replaceChildren(...now.decisions.slice(0, 12).map((d) => {
    const item = element("li");
    item.append(element("span", "ago", ago(d.ago_s)), element("span", "", `${short(d.request_id)}, ${d.num_tokens} tokens → ${d.chosen}`), element("span", "reason", d.reason));
    if (d.candidates.length) {
      const box = element("span", "candidates");
      d.candidates.forEach((c, i) => {
        if (i) box.append(" · ");
        const cost = `${seconds(c.ttft_s)} + ${seconds(c.harm_s)}`;
        box.append(element(c.replica === d.chosen ? "b" : "span", "", c.replica), ` ${c.cached_tokens} cached, queue ${seconds(c.queued_s)}, cost ${cost}`);
      });
      item.append(box);
    }
    return item;
  }));
  $("events").replaceChildren(...(now.events.length ? now.events : [null]).map((e) => {
    if (!e) return element("li", "", "No replica has started or stopped since this page was opened.");
    const item = element("li");
    item.append(element("span", "ago", ago(e.ago_s)), element("span", e.kind === "silent" ? "silent-event" : e.kind, { came: "started", went: "stopped", silent: "silent", back: "answers again" }[e.kind]), element("span", "", e.replica));
    return item;
  }));
}

function curves() {
  const of = histories.get(chosen);
  if (of) {
    memoryChart.show(of.memory);
    mappingChart.show(of.mapping);
    batchChart.show(of.steps.map(([t, batch, waiting]) => [t, batch, waiting]));
    stepChart.show(of.steps.map(([t, , , longest]) => [t, longest]));
    hitChart.show(of.hits);
  }
  tokenChart.show(common.tokens);
  ttftChart.show(common.ttft);
  tpotChart.show(common.tpot);
}

function show(now) {
  state = now;
  arrived();
  const models = [...new Set(now.replicas.flatMap((r) => r.models.map((m) => m.name)))];
  $("model").textContent = models.length ? `${models.length} models` : now.model;
  offer(models);
  if (!$("links").childElementCount) $("links").append(...Object.entries(now.links).map(([name, url]) => Object.assign(element("a", "button", name), { href: url, target: "_blank", rel: "noopener" })));
  const names = now.replicas.map((r) => r.name), before = chosen;
  if (!names.includes(chosen) && !silentOnes(now).has(chosen)) chosen = names[0] ?? chosen;
  record(now);
  if (!document.hidden) draw(now);
  if (before !== chosen && names.length > FEW) states.changed();
}

function draw(now) {
  figures(now);
  replicas(now);
  for (const table of deviceTables) table.show(replicaOf(now));
  blocks(now);
  regions(now);
  lists(now);
  curves();
}

function choose(name) {
  if (name === chosen || !name) return;
  chosen = name;
  hovered = null;
  if (state && !state.details[name]) states.changed();
  if (state) { replicas(state); for (const table of deviceTables) table.show(replicaOf(state)); blocks(state); regions(state); curves(); }
}

// ---- what the user does ----

const playground = new Playground({
  begins: () => { states.changed(); return Promise.race([new Promise((done) => (arrived = done)), new Promise((done) => setTimeout(done, 500))]); },
  known: (replica) => { if (state?.replicas.some((r) => r.name === replica)) choose(replica); states.changed(); },
  ends: () => setTimeout(() => states.changed(), 1500),
  askKey,
  model: () => modelChoice.value || state?.model,
});

/** Offer these models in the playground, unless it does already. */
function offer(models) {
  $("model-choice").hidden = !models.length;
  if (models.join("\n") === [...modelChoice.options].map((o) => o.value).join("\n")) return;
  const before = modelChoice.value;
  modelChoice.replaceChildren(...models.map((name) => new Option(name)));
  if (models.includes(before)) modelChoice.value = before;
}

function wish() {
  const query = new URLSearchParams();
  if (chosen && (state?.replicas.length ?? 0) > FEW) query.append("replica", chosen);
  if (playground?.answer && !playground.answer.endedAt) {
    query.append("fast", "true");
    if (playground.answer.request) query.append("request", playground.answer.request);
  }
  return query;
}

let asking = null;
function askKey(reason) {
  asking ??= new Promise((done) => {
    $("key-reason").textContent = reason;
    $("key-dialog").showModal();
    $("key-dialog").addEventListener("close", () => { keepKey($("key").value.trim()); $("key").value = ""; asking = null; done(); }, { once: true });
  });
  return asking;
}
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

function tell(kind, text) {
  $("connection").className = kind;
  if ($("connection-text").textContent !== text) $("connection-text").textContent = text;
}

const movement = new Movement();
const states = new States(wish, {
  onState: (now) => { show(now); tell(...movement.status(now, ago)); },
  onStatus: tell,
  askKey,
});

const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("folio-theme", theme);
  redraw();
}
function redraw() {
  $("theme").textContent = "Theme: " + document.documentElement.dataset.theme;
  readColours();
  recolour();
  if (state) { replicas(state); blocks(state); regions(state); curves(); }
}
function nextTheme() { setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]); }
$("theme").addEventListener("click", nextTheme);
$("help").addEventListener("click", () => $("help-dialog").showModal());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.addEventListener("visibilitychange", () => { if (!document.hidden && state) draw(state); });
let resized = 0;
addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(() => { if (state) { replicas(state); blocks(state); regions(state); } }); });

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { playground.stop(); document.activeElement?.blur?.(); tip(null); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA)$/.test(event.target.tagName) || document.querySelector("dialog[open]")) return;
  const names = state?.replicas.map((r) => r.name) ?? [], at = names.indexOf(chosen);
  if (event.key === "j" || event.key === "k") {
    choose(names[(at + (event.key === "j" ? 1 : names.length - 1)) % names.length]);
    cards.get(chosen)?.box.scrollIntoView({ block: "nearest" });
  } else if (event.key === "/") { event.preventDefault(); $("message").focus(); }
  else if (event.key === "b") maps[0]?.canvas.focus();
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") $("help-dialog").showModal();
});
redraw();
// For tests: what is shown now.
window.folio = { get state() { return state; }, get chosen() { return chosen; }, get marked() { return maps.reduce((n, m) => n + m.marked.size, 0); }, charts };
