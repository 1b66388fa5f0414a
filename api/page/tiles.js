// The figures at the head of a job's page.

import { h, setText } from "./dom.js";
import { done, ended } from "./status.js";
import { count, duration, none, percent, plural, rate } from "./text.js";

const TILES = [["completed", "Completed"], ["failed", "Failed"], ["left", "To do"], ["speed", "Tokens/s"], ["requests", "Requests/s"],
  ["eta", "Time left"], ["prompt", "Prompt tokens"], ["cached", "Prefix hits"], ["output", "Output tokens"]];

export class Tiles {
  constructor() {
    this.tiles = new Map(TILES.map(([name]) => [name, h("dd", { class: "number" }, none)]));
    this.element = h("dl", { class: "tiles" }, TILES.map(([name, title]) => h("div", {}, h("dt", {}, title), this.tiles.get(name))));
  }

  // `summary` is there when the job has ended; `waits` says why it stands still.
  show(batch, { pace, summary, waits }) {
    const over = ended(batch);
    const speeds = over ? final(batch, summary) : waits ? {} : live(batch, pace);
    const texts = { ...counted(batch), speed: rate(speeds.tokens), requests: rate(speeds.requests), eta: duration(speeds.left) };
    for (const [name, text] of Object.entries(texts)) {
      const tile = this.tiles.get(name);
      setText(tile, text);
      // What a job that has ended does not have will never come.
      tile.parentElement.hidden = over && text === none;
    }
    const { failed, total } = batch.request_counts;
    this.element.hidden = Boolean(over && !total);
    this.tiles.get("failed").classList.toggle("bad", failed > 0);
    this.tiles.get("cached").title = plural(batch.usage.input_tokens_details.cached_tokens, "token");
    setText(this.tiles.get("left").previousSibling, over ? "Never ran" : "To do");
  }
}

function counted(batch) {
  const { request_counts: counts, usage } = batch;
  return { completed: count(counts.completed), failed: count(counts.failed), left: count(counts.total - done(batch)),
    prompt: count(usage.input_tokens), cached: percent(usage.input_tokens_details.cached_tokens, usage.input_tokens),
    output: count(usage.output_tokens) };
}

function live(batch, pace) {
  return { ...pace.rates(batch), left: pace.secondsLeft(batch) };
}

function final(batch, summary) {
  const seconds = summary?.running_seconds;
  return { tokens: summary?.tokens_per_second, requests: seconds ? batch.request_counts.completed / seconds : null };
}
