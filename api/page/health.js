// What is away, and what the reader is told of it: the notice, and the light beside the search.

import { announce, h, setText } from "./dom.js";
import { clockTime } from "./text.js";

const REASONS = ["load", "stream", "servers"];

export class Health {
  constructor() {
    this.notice = document.getElementById("notice");
    this.live = document.getElementById("live");
    this.forget();
  }

  // No view, no stream, no trouble.
  forget() {
    this.facts = { connected: null, load: null, stream: null, servers: null };
    this.knownAt = null;
    this.since = null;
    this.show();
  }

  // `connected`: whether the stream is; `load`, `stream` and `servers`: why the view could not be loaded, why the
  // stream broke, and what the stream tells of Redis and the store. Null: nothing is wrong.
  set(facts) {
    Object.assign(this.facts, facts);
    this.show();
  }

  opened() {
    this.knownAt = null;
    this.show();
  }

  loaded() {
    this.knownAt = now();
    this.set({ load: null });
  }

  get reason() {
    return REASONS.map((name) => this.facts[name]).find(Boolean) ?? null;
  }

  show() {
    const { reason } = this;
    if (reason) this.since ??= now();
    else if (this.since) announce("Connected again.");
    if (!reason) this.since = null;
    this.showNotice(reason);
    const { connected } = this.facts;
    this.live.className = `live ${connected && !reason ? "live" : "away"}`;
    setText(this.live, connected === null ? "" : !connected ? "Reconnecting…" : reason ? "Waiting…" : "Live");
  }

  showNotice(reason) {
    // While nothing has been loaded, nothing of what was known is shown.
    const known = this.knownAt === null ? "" : ` Shown is what was known at ${clockTime(Math.max(this.since, this.knownAt))}.`;
    const words = reason ? `${reason}${known} Trying again.` : "";
    if (this.notice.textContent === words) return;
    this.notice.replaceChildren(...(reason ? [h("p", { class: "notice" }, h("b", {}, reason), words.slice(reason.length))] : []));
  }
}

const now = () => Date.now() / 1000;
