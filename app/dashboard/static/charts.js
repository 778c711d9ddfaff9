// Charts over the last minutes, with uPlot (`uPlot.LICENSE`).

const MOST_POINTS = 600;
export const charts = [];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

export class Chart {
  /**
   * @param series [{label, colour, fill, dash, points}]
   * @param options {stacked, format, floor, increments, height}: `floor` is the least height of the scale, `increments`
   *   are the distances of its lines to choose from, `height` gives a row's, where not all series count
   */
  constructor(id, series, { stacked = false, format = (v) => v, floor = 1, steps = false, most = null, increments, height } = {}) {
    Object.assign(this, { element: document.getElementById(id), series, stacked, format, floor, steps, most, increments, height });
    this.rows = [];
    this.make();
    charts.push(this);
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.element);
  }

  size() { return { width: Math.max(this.element.clientWidth, 120), height: 170 }; }

  make() {
    this.plot?.destroy();
    const soft = colour("soft"), grid = { stroke: colour("grid"), width: 1 }, format = this.format;
    const axis = { stroke: soft, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const value = (u, v, s, i) => {
      const row = this.rows[i ?? this.rows.length - 1];
      return row?.[s] == null ? "–" : format(row[s]);
    };
    const clock = (u, times) => times.map((t) => this.rows.length ? new Date(t * 1e3).toLocaleTimeString("en-GB") : "");
    const heights = { ...axis, size: 58, values: (u, values) => values.map(format), ...this.increments && { incrs: this.increments } };
    this.plot = new uPlot({
      ...this.size(),
      padding: [8, 8, 0, 0],
      cursor: { points: { show: false }, y: false },
      scales: { x: { time: true }, y: { range: (u, low, high) => [0, this.most ?? Math.max(this.highest(high ?? 0) * 1.08, this.floor)] } },
      axes: [{ ...axis, size: 26, space: 80, values: clock }, heights],
      series: [{ label: "time", value: "{HH}:{mm}:{ss}" }, ...this.series.map((s) => ({
        label: s.label, stroke: colour(s.colour), width: this.stacked && s.fill ? 0.5 : 1.5, dash: s.dash,
        fill: s.fill ? colour(s.colour) + (this.stacked ? "" : "2e") : undefined, value,
        paths: this.steps ? uPlot.paths.stepped({ align: -1 }) : undefined, points: { show: false },
      }))],
    }, this.data(), this.element);
    this.element.setAttribute("role", "img");
  }

  highest(shown) { return this.height ? Math.max(0, ...this.rows.map(this.height)) : shown; }

  /** Stacked series are drawn from the highest sum down, so that each covers the one behind it. */
  data() {
    const columns = [this.rows.map((row) => row[0]), ...this.series.map((_, s) => this.rows.map((row) => row[s + 1]))];
    if (!this.stacked) return columns;
    const sums = this.rows.map(() => 0);
    for (let s = this.series.length; s >= 1; s--) {
      if (!this.series[s - 1].fill) continue;
      columns[s] = columns[s].map((v, i) => (sums[i] += v ?? 0));
    }
    return columns;
  }

  show(rows) {
    this.rows = rows.slice(-MOST_POINTS);
    this.plot.setData(this.data());
    const last = this.rows.at(-1);
    if (last) {
      const now = this.series.map((s, i) => `${s.label} ${this.format(last[i + 1] ?? 0)}`).join(", ");
      this.element.setAttribute("aria-label", `Now: ${now}`);
    }
  }
}

export function recolour() { for (const chart of charts) { chart.make(); } }
