// Tables of a replica's device: the models that share it, and the memory of a GPU by part.
const COLUMNS = ["model", "state", "memory of the device", "weights", "KV", "kept", "running", "waiting", "wakes", "last wake", "expected wait", "evicted"];

const cell = (tag, text, className) => {
  const found = document.createElement(tag);
  found.textContent = text;
  if (className) found.className = className;
  return found;
};

/** A bar of named parts, each as wide as its share of the device. */
function bar(parts, capacity) {
  const found = cell("td", "", "bar");
  for (const [name, bytes] of parts) {
    const part = cell("span", "", name);
    part.style.width = (100 * bytes) / capacity + "%";
    found.append(part);
  }
  return found;
}

/** A table with a row for each model, those with the most requests and memory first. Does nothing for a single model. */
export class ModelTable {
  constructor(panel, { bytes, seconds }) {
    Object.assign(this, { panel, bytes, seconds, note: panel.querySelector(".note"), table: panel.querySelector("table") });
    const head = document.createElement("tr");
    head.append(...COLUMNS.map((name) => cell("th", name)));
    this.body = document.createElement("tbody");
    this.table.append(document.createElement("thead"), this.body);
    this.table.tHead.append(head);
  }

  show(replica) {
    const { bytes, seconds } = this, device = replica?.device;
    this.panel.hidden = !device;
    if (!device) return;
    const taken = device.used_bytes + device.charged_bytes + device.workspace_bytes;
    this.note.textContent = `${bytes(taken)} of ${bytes(device.capacity_bytes)} taken, of it ${bytes(device.workspace_bytes)} for the tensors of a step. ` +
      `${bytes(device.idle_bytes)} of pages are idle, between two models. The models with requests need ${bytes(device.needed_bytes)}.`;
    const held = (m) => m.device_weight_bytes + m.kv_bytes, asked = (m) => m.num_running + m.num_waiting;
    const models = [...replica.models].sort((a, b) => asked(b) - asked(a) || held(b) - held(a) || (a.name < b.name ? -1 : 1));
    this.body.replaceChildren(...models.map((m) => {
      const row = document.createElement("tr"), figure = (text) => cell("td", text, "number");
      const size = (v) => (v ? bytes(v) : "–");
      row.append(cell("td", m.name), cell("td", m.state, "state " + m.state), bar([["weights", m.device_weight_bytes], ["kv", m.kv_bytes]], device.capacity_bytes), figure(size(m.device_weight_bytes)), figure(size(m.kv_bytes)), figure(size(m.kept_bytes)),
        figure(m.num_running), figure(m.num_waiting), figure(m.num_wakes), figure(m.num_wakes ? seconds(m.last_wake_s) : "–"),
        figure(m.state === "failed" ? "–" : seconds(m.wake_s)), cell("td", m.num_evictions ? `${m.num_evictions}, last for ${m.evicted_for}` : "0"));
      if (m.error) row.title = m.error;
      return row;
    }));
  }
}

/** A row for each part of a GPU's memory. Does nothing on a CPU. */
export class GpuTable {
  constructor(panel, { bytes }) {
    Object.assign(this, { panel, bytes, note: panel.querySelector(".note"), body: document.createElement("tbody") });
    panel.querySelector("table").append(this.body);
  }

  show(replica) {
    const { bytes } = this, gpu = replica?.gpu;
    this.panel.hidden = !gpu;
    if (!gpu) return;
    const parts = Object.entries(gpu.parts).filter(([, size]) => size), capacity = parts.reduce((sum, [, size]) => sum + size, 0);
    this.note.textContent = `${bytes(capacity)} in all; ${bytes(gpu.pinned_bytes)} of host memory are pinned for it.`;
    this.body.replaceChildren(...parts.map(([name, size]) => {
      const row = document.createElement("tr");
      row.append(cell("td", name), bar([[name, size]], capacity), cell("td", bytes(size), "number"));
      return row;
    }));
  }
}
