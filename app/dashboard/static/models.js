// The models of a replica that share a device: states, memory, requests, wakes and evictions.
const COLUMNS = ["model", "state", "memory of the device", "weights", "KV", "running", "waiting", "wakes", "last wake", "expected wait", "evicted"];

const cell = (tag, text, className) => {
  const found = document.createElement(tag);
  found.textContent = text;
  if (className) found.className = className;
  return found;
};

/** A bar of a model's weights and KV memory, as wide as its share of the device. */
function bar(model, capacity) {
  const found = cell("td", "", "bar");
  for (const [name, bytes] of [["weights", model.device_weight_bytes], ["kv", model.kv_bytes]]) {
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
      row.append(cell("td", m.name), cell("td", m.state, "state " + m.state), bar(m, device.capacity_bytes), figure(size(m.device_weight_bytes)), figure(size(m.kv_bytes)),
        figure(m.num_running), figure(m.num_waiting), figure(m.num_wakes), figure(m.num_wakes ? seconds(m.last_wake_s) : "–"),
        figure(m.state === "failed" ? "–" : seconds(m.wake_s)), cell("td", m.num_evictions ? `${m.num_evictions}, last for ${m.evicted_for}` : "0"));
      if (m.error) row.title = m.error;
      return row;
    }));
  }
}
