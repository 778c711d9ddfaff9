// Canvases: the map of blocks, small maps, and regions.

export const COLOURED = ["unbacked", "free", "active", "shared", "pinned", "cached", "parked", "moving", "swapped"];
const MOTION_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 350;

let colours = {};
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [...COLOURED, "ink", "soft", "panel", "line", "accent"]) colours[name] = style.getPropertyValue("--" + name).trim();
  return colours;
}

export function decode(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

function sized(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth || canvas.parentElement.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

/** An overview: one column of pixels a cell. */
export function drawMini(canvas, map, names) {
  const [context, width] = sized(canvas, 34);
  context.fillStyle = colours.unbacked;
  context.fillRect(0, 0, width, 34);
  if (!map) return;
  const cells = decode(map.cells), columns = Math.max(1, Math.min(Math.ceil(cells.length / 4), Math.floor(width / 4)));
  const rows = Math.ceil(cells.length / columns), w = width / columns, h = 34 / rows;
  cells.forEach((state, i) => {
    if (!state) return;
    context.fillStyle = colours[names[state]];
    context.fillRect((i % columns) * w, Math.floor(i / columns) * h, Math.max(w - 0.5, 0.5), Math.max(h - 0.5, 0.5));
  });
}

/** The map of one layer group. Blocks are cells, row by row; pages that come grow, those that go shrink. */
export class BlockMap {
  constructor(parent, tip, onHover) {
    this.box = document.createElement("div");
    this.box.className = "map";
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.box.append(this.canvas);
    parent.append(this.box);
    this.tip = tip;
    this.onHover = onHover;
    this.cells = new Uint8Array();
    this.before = this.cells;
    this.changedAt = new Float64Array();
    this.marked = new Set();
    this.at = -1;
    this.canvas.addEventListener("pointermove", (event) => this.point(this.indexAt(event), event));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.point(-1));
  }

  /** @param marked Set of block ids to outline, or null. */
  show(map, names, marked, owners) {
    Object.assign(this, { map, names, owners });
    const cells = decode(map.cells), now = performance.now();
    this.counts = map.cell_counts ? new Uint16Array(decode(map.cell_counts).buffer) : null;
    const same = cells.length === this.cells.length;
    const changedAt = same ? this.changedAt : new Float64Array(cells.length).fill(-1e9);
    const before = same ? this.before : cells.slice();
    if (same) cells.forEach((state, i) => { if (state !== this.cells[i]) { before[i] = this.cells[i]; changedAt[i] = now; } });
    Object.assign(this, { cells, before, changedAt });
    this.mark(marked);
    const parts = Object.entries(map.counts).filter(([name, n]) => n && name !== "unbacked").map(([name, n]) => `${n} ${name}`);
    this.canvas.setAttribute("aria-label", `${map.num_blocks} blocks: ${parts.join(", ") || "no pages"}. Arrow keys walk over them.`);
  }

  mark(marked) {
    const per = this.map?.blocks_per_cell ?? 1;
    this.marked = new Set([...(marked ?? [])].map((id) => Math.floor((id - 1) / per)));
    this.animate();
  }

  animate() {
    cancelAnimationFrame(this.frame);
    this.draw();
    if (performance.now() - Math.max(...this.latest(), -1e9) < MOTION_MS) this.frame = requestAnimationFrame(() => this.animate());
  }

  latest() { let most = -1e9; for (const at of this.changedAt) if (at > most) most = at; return [most]; }

  draw() {
    const n = this.cells.length, width = this.box.clientWidth;
    if (!n || !width) return;
    const columns = Math.max(1, Math.floor(width / Math.max(4, Math.min(26, Math.sqrt((width * 250) / n)))));
    const size = Math.min(width / columns, 30);
    const gap = size > 8 ? 2 : 1, rows = Math.ceil(n / columns), height = rows * size;
    Object.assign(this, { size, columns });
    this.canvas.style.height = height + "px";
    const [context] = sized(this.canvas, height), now = performance.now(), dim = this.marked.size > 0;
    for (let i = 0; i < n; i++) {
      const x = (i % columns) * size, y = Math.floor(i / columns) * size, side = size - gap;
      const t = MOTION_MS ? Math.min((now - this.changedAt[i]) / MOTION_MS, 1) : 1;
      context.globalAlpha = dim && !this.marked.has(i) ? 0.28 : 1;
      context.fillStyle = colours.unbacked;
      const state = this.cells[i], old = this.before[i];
      if (!state || !old || t < 1) round(context, x + side * 0.3, y + side * 0.3, side * 0.4, 1.5);
      if (t < 1 && old) { context.fillStyle = colours[this.names[old]]; grown(context, x, y, side, state ? 1 : 1 - t); }
      if (state) {
        if (this.counts) this.stack(context, i, x, y, side);
        else { context.fillStyle = colours[this.names[state]]; grown(context, x, y, side, t); }
      }
      if (this.marked.has(i)) {
        context.strokeStyle = colours.ink;
        context.lineWidth = 1.6;
        context.strokeRect(x - 0.4, y - 0.4, side + 0.8, side + 0.8);
      }
    }
    context.globalAlpha = 1;
    if (this.at >= 0 && this.at < n) {
      context.strokeStyle = colours.accent;
      context.lineWidth = 2;
      context.strokeRect((this.at % columns) * size - 1, Math.floor(this.at / columns) * size - 1, size - gap + 2, size - gap + 2);
    }
  }

  /** A cell of several blocks: their states on top of each other. */
  stack(context, i, x, y, side) {
    const k = this.names.length;
    let total = 0, top = y + side;
    for (let s = 0; s < k; s++) total += this.counts[i * k + s];
    for (let s = k - 1; s > 0; s--) {
      const count = this.counts[i * k + s];
      if (!count) continue;
      const h = Math.max(side * (count / total), 1);
      top -= h;
      context.fillStyle = colours[this.names[s]];
      context.fillRect(x, Math.max(top, y), side, h);
    }
  }

  indexAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size), row = Math.floor((event.clientY - box.top) / this.size);
    const i = row * this.columns + column;
    return column < this.columns && i < this.cells.length ? i : -1;
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const i = Math.max(0, Math.min(this.cells.length - 1, this.at < 0 ? 0 : this.at + step)), box = this.canvas.getBoundingClientRect();
    this.point(i, { clientX: box.left + ((i % this.columns) + 1) * this.size, clientY: box.top + (Math.floor(i / this.columns) + 1) * this.size });
  }

  point(i, event) {
    if (i !== this.at) { this.at = i; this.draw(); }
    if (i < 0 || !this.map) { this.tip(null); this.onHover?.(null); return; }
    const per = this.map.blocks_per_cell, first = i * per + 1, state = this.names[this.cells[i]];
    const owner = per === 1 ? this.owners?.get(first) : null;
    const what = per === 1 ? `block ${first}: ${state === "unbacked" ? "no page" : state}` : `blocks ${first} to ${Math.min(first + per - 1, this.map.num_blocks)}: mostly ${state}`;
    this.tip(what + (owner ? `, ${owner}` : ""), event);
    this.onHover?.(per === 1 ? first : null);
  }
}

function grown(context, x, y, side, t) {
  const s = side * (0.35 + 0.65 * t);
  round(context, x + (side - s) / 2, y + (side - s) / 2, s, Math.min(3, s / 4));
}

function round(context, x, y, side, radius) {
  context.beginPath();
  context.roundRect(x, y, side, side, radius);
  context.fill();
}

export function blocksOf(table) {
  const ids = [];
  for (let i = 0; i < table.runs.length; i += 2) for (let k = 0; k < table.runs[i + 1]; k++) ids.push(table.runs[i] + k);
  return ids;
}

/** One region: its places in order, filled as far as they have a page; dotted where only addresses are reserved. */
export function drawRegion(canvas, { places, mapped, extent, scale, cachedPlaces, hover }) {
  const [context, width] = sized(canvas, 22), shown = Math.min(scale, extent);
  const fade = extent > shown ? 42 : 0, w = (width - fade) / shown, gap = w > 6 ? 1.5 : w > 3 ? 0.6 : 0;
  context.setLineDash([2, 3]);
  context.strokeStyle = colours.soft;
  context.globalAlpha = 0.55;
  context.beginPath();
  context.moveTo(0, 16.5);
  context.lineTo(width - fade, 16.5);
  context.stroke();
  if (fade) {
    const to = context.createLinearGradient(width - fade, 0, width, 0);
    to.addColorStop(0, colours.soft);
    to.addColorStop(1, "transparent");
    context.strokeStyle = to;
    context.beginPath();
    context.moveTo(width - fade, 16.5);
    context.lineTo(width, 16.5);
    context.stroke();
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
  places.slice(0, shown).forEach((place, i) => {
    context.fillStyle = colours[place.state];
    context.fillRect(i * w, 2, Math.max(w - gap, 0.8), 14);
    if (place.id === hover) {
      context.strokeStyle = colours.accent;
      context.lineWidth = 2;
      context.strokeRect(i * w - 1, 1, Math.max(w - gap, 0.8) + 2, 16);
    }
  });
  context.fillStyle = colours.parked;
  for (let i = places.length; i < Math.min(mapped, shown); i++) context.fillRect(i * w, 6, Math.max(w - gap, 0.8), 10);
  if (cachedPlaces > 0) {
    context.fillStyle = colours.cached;
    context.fillRect(0, 18.5, Math.min(cachedPlaces, shown) * w - gap, 2.5);
  }
}
