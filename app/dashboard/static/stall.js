// Whether the replicas move: steps end while requests run or wait.

const STALLED_S = 3;

export class Movement {
  constructor() { this.movedAt = new Map(); }

  /** Take a state. Returns the connection's class and text: live, or how long the slowest replica has ended no step. */
  status(now, ago) {
    const longest = Math.max(0, ...now.replicas.map(({ name, steps, load }) => {
      const isIdle = !(load.num_running + load.num_waiting);
      if (steps.num.length || isIdle || !this.movedAt.has(name)) this.movedAt.set(name, now.at);
      return now.at - this.movedAt.get(name);
    }));
    return longest >= STALLED_S ? ["stalled", `stalled for ${ago(longest)}`] : ["live", "live"];
  }
}
