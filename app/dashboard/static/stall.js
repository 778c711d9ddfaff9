// Detects stalls: replicas that do not answer, or that end no step while requests run or wait.

const STALLED_S = 3;

export class Movement {
  constructor() { this.movedAt = new Map(); this.answeredAt = null; }

  /** Take a state. Returns the connection's class and text: live, or for how long replicas have not answered, or the
   *  slowest one has ended no step. */
  status(now, ago) {
    const longest = Math.max(0, ...now.replicas.map(({ name, steps, load }) => {
      const isIdle = !(load.num_running + load.num_waiting);
      if (steps.num.length || isIdle || !this.movedAt.has(name)) this.movedAt.set(name, now.at);
      return now.at - this.movedAt.get(name);
    }));
    if (!now.num_silent || this.answeredAt == null) this.answeredAt = now.at;
    const silent = now.at - this.answeredAt, number = now.num_silent + now.replicas.length;
    if (silent >= STALLED_S) return ["stalled", `no answer from ${now.num_silent} of ${number} replicas for ${ago(silent)}`];
    return longest >= STALLED_S ? ["stalled", `stalled for ${ago(longest)}`] : ["live", "live"];
  }
}
