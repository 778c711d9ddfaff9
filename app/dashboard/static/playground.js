// Playground: a conversation with the model, and what its prompt found in the cache.
import { Refused, events, headers } from "./stream.js";

const $ = (id) => document.getElementById(id);

export class Playground {
  /**
   * @param on {begins, known(replica), ends, askKey, model}
   * `answer`: {request, replica, blocks, endedAt} of the latest one
   */
  constructor(on) {
    this.on = on;
    this.messages = [];
    this.answer = null;
    $("chat").addEventListener("submit", (event) => { event.preventDefault(); this.running ? this.stop() : this.send(); });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!this.running) this.send(); }
    });
    $("clear").addEventListener("click", () => { this.stop(); this.messages = []; $("conversation").replaceChildren(); $("prompt-tokens").hidden = true; });
  }

  stop() { this.running?.abort(); }

  say(role, text) {
    const box = document.createElement("div");
    box.className = "message " + role;
    const words = document.createElement("span");
    words.textContent = text;
    box.append(words);
    $("conversation").append(box);
    box.scrollIntoView({ block: "nearest" });
    return box;
  }

  async send() {
    const text = $("message").value.trim();
    if (!text) return;
    $("message").value = "";
    this.say("user", text);
    const { messages } = this, before = messages.length; // `Clear` begins another list
    messages.push({ role: "user", content: text });
    this.running = new AbortController();
    $("send").textContent = "Stop";
    const answer = this.answer = { request: null, replica: null, blocks: {}, endedAt: 0 };
    let prompt = null;
    try {
      await this.on.begins(); // from now on the map is polled often
      prompt = await this.stream();
    } catch (error) {
      const { aborted } = this.running.signal;
      if (!aborted || messages.length === before + 1) messages.length = before; // no question without its answer
      if (aborted && this.messages === messages) this.say("error", "stopped");
      if (!aborted) {
        this.say("error", error.message);
        $("message").value = text;
        if (error instanceof Refused && error.status === 401) await this.on.askKey(error.message);
      }
    } finally {
      this.running = null;
      $("send").textContent = "Send";
      this.answer.endedAt = performance.now();
      this.on.ends();
    }
    const isLatest = () => this.answer === answer && this.messages === messages;
    if (prompt) await this.showTokens(prompt, isLatest).catch((error) => { if (isLatest()) this.say("error", error.message); });
  }

  /** Send `messages`, and show the answer; its `{messages, cached}` if the server has counted the prompt. */
  async stream() {
    const { messages } = this, body = {
      model: this.on.model(), messages, stream: true, stream_options: { include_usage: true },
      max_tokens: Number($("max-tokens").value) || 200, temperature: Number($("temperature").value) || 0,
    };
    const asked = [...messages], begun = performance.now();
    let box = null, words = "", first = 0, usage = null;
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: this.running.signal };
    try {
      for await (const data of events("v1/chat/completions", options)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        if (!this.answer.request) {
          const [request, replica] = chunk.id.split(".");
          Object.assign(this.answer, { request, replica });
          this.on.known(replica);
        }
        usage = chunk.usage ?? usage;
        const piece = chunk.choices[0]?.delta.content;
        if (!piece) continue;
        first ||= performance.now();
        box ??= this.say("assistant", "");
        words += piece;
        box.firstChild.textContent = words;
        $("conversation").scrollTop = $("conversation").scrollHeight;
      }
    } finally {
      if (words) messages.push({ role: "assistant", content: words });
    }
    box ??= this.say("assistant", "");
    if (!usage) return null;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, made = usage.completion_tokens, time = (performance.now() - first) / 1e3;
    const note = document.createElement("small");
    note.textContent = `first token ${((first - begun) / 1e3).toFixed(2)} s, ${made} tokens${made > 1 && time > 0 ? ` at ${((made - 1) / time).toFixed(0)}/s` : ""}; prompt ${usage.prompt_tokens} tokens, ${cached} of them cached`;
    box.append(note);
    return { model: body.model, messages: asked, cached };
  }

  /** The prompt's tokens, those that were found in the cache highlighted: always the first ones. */
  async showTokens({ model, messages, cached }, isLatest) {
    const answer = await fetch("tokenize", { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify({ model, messages, return_token_strs: true }) });
    if (!answer.ok) return;
    const { token_strs: texts, count } = await answer.json();
    if (!isLatest()) return;
    $("prompt-tokens").hidden = false;
    $("prompt-tokens").firstElementChild.textContent = `Prompt: ${cached} of ${count} tokens were cached`;
    $("tokens").replaceChildren(...texts.slice(0, 2000).map((text, i) => {
      const token = document.createElement("span");
      token.className = i < cached ? "token cached" : "token";
      token.textContent = text.replaceAll("\n", "⏎");
      return token;
    }));
  }
}
