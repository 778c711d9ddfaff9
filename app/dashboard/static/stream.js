// Reading server-sent events with `fetch`, which, unlike EventSource, can send an API key.

const KEY = "folio-key";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, authorization: `Bearer ${key}` } : extra;
}

export function keepKey(key) { sessionStorage.setItem(KEY, key); }

/** Data of the events of a request, one after the other. Throws `Refused` for an answer that is no stream. */
export async function* events(url, options = {}) {
  const answer = await fetch(url, { ...options, headers: headers(options.headers) });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, body.error?.message ?? `${answer.status} ${answer.statusText}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** States of the dashboard for ever. `wish` returns the query; `changed()` opens another stream at once. */
export class States {
  constructor(wish, { onState, onStatus, askKey }) {
    Object.assign(this, { wish, onState, onStatus, askKey });
    this.pause = 500;
    this.run();
  }

  changed() { this.abort?.abort("changed"); }

  async run() {
    for (;;) {
      this.abort = new AbortController();
      const query = this.wish().toString();
      try {
        // No event for 10 s: the connection is dead, or the machine was asleep.
        let timer = 0;
        const alive = () => { clearTimeout(timer); timer = setTimeout(() => this.abort.abort("silent"), 10000); };
        alive();
        try {
          for await (const data of events("dashboard/events" + (query && "?" + query), { signal: this.abort.signal })) {
            alive();
            this.pause = 500;
            this.onState(JSON.parse(data));
          }
        } finally {
          clearTimeout(timer);
        }
      } catch (error) {
        if (this.abort.signal.reason === "changed") continue;
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          this.onStatus("lost", "an API key is needed");
          await this.askKey(error.message);
          continue;
        }
        this.onStatus("lost", error instanceof Refused ? error.message : "no connection; trying again");
      }
      // Also after a stream that just ended: those of a server that drains end at once.
      await new Promise((done) => setTimeout(done, this.pause));
      this.pause = Math.min(this.pause * 2, 8000);
    }
  }
}
