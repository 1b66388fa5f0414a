// What a job's status looks like: a shape and a word, so that no colour has to be told from another.

import { noted, secondsLeft, sinceStart } from "./eta.js";
import { h, s, setAttribute, setText } from "./dom.js";
import { count, percent } from "./text.js";

const WORDS = {
  validating: "Checking lines", in_progress: "Running", finalizing: "Writing results", completed: "Completed",
  failed: "Failed", expired: "Expired", cancelling: "Cancelling", cancelled: "Cancelled",
};
const SHAPES = {
  validating: "M8 2.5a5.5 5.5 0 1 1-5.5 5.5", in_progress: "M5 3.5v9l7.5-4.5z", finalizing: "M8 2.5v8M4.5 7.5 8 11l3.5-3.5M3 13.5h10",
  completed: "M3 8.5l3.5 3.5L13 4.5", failed: "M4 4l8 8M12 4l-8 8", expired: "M8 2.5a5.5 5.5 0 1 0 .01 0M8 5v3.5l2.5 1.5",
  cancelling: "M4 4h8v8H4z", cancelled: "M4 4h8v8H4z",
};

export const ended = (batch) => ["completed", "failed", "expired", "cancelled"].includes(batch.status);
export const word = (status) => WORDS[status] ?? status;

export function badge(status) {
  const shape = s("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: SHAPES[status] ?? "M3 8h10" }));
  return h("span", { class: `badge ${status}` }, shape, word(status));
}

// An id whose end stays readable where there is no room for its middle.
export function idText(id) {
  return h("span", { class: "id", title: id }, h("span", { class: "head" }, id.slice(0, -8)), h("span", {}, id.slice(-8)));
}

// What its submitter calls it, if anything.
export const nameOf = (batch) => batch.metadata?.name ?? batch.metadata?.description ?? "";

export function done(batch) {
  return batch.request_counts.completed + batch.request_counts.failed;
}

export class Progress {
  constructor(label) {
    this.bar = h("progress", { "aria-label": label, max: "1" });
    this.text = h("span", { class: "number" });
    this.element = h("div", { class: "progress" }, this.bar, this.text);
  }

  show(batch) {
    const { total } = batch.request_counts;
    // What has not been planned has no total: a bar would be a guess.
    this.bar.hidden = !total;
    this.bar.max = Math.max(1, total);
    this.bar.value = done(batch);
    setAttribute(this.bar, "class", batch.request_counts.failed ? "some-failed" : null);
    const far = done(batch) === total ? count(total) : `${count(done(batch))} of ${count(total)}`;
    setText(this.text, total ? `${far} · ${percent(done(batch), total)}` : "");
  }
}

// How fast a job goes: over the last minute of what was seen.
export class Pace {
  constructor() {
    this.seen = [];
    this.looks = [];
  }

  add(batch) {
    const now = Date.now() / 1000;
    this.seen.push([now, done(batch), batch.usage.output_tokens]);
    const { completed, failed } = batch.request_counts;
    if (batch.status === "in_progress") this.looks = noted(this.looks, [now, completed, failed]);
    while (this.seen.length > 2 && now - this.seen[1][0] > 60) this.seen.shift();
  }

  secondsLeft(batch) {
    if (batch.status !== "in_progress") return null;
    const { total, completed, failed } = batch.request_counts;
    const now = Date.now() / 1000;
    const ran = [now - (batch.in_progress_at ?? now), completed, failed];
    return secondsLeft([...this.looks, [now, completed, failed]], total) ?? sinceStart(ran, total);
  }

  rates(batch) {
    const [first, last] = [this.seen[0], this.seen.at(-1)];
    const long = last && last[0] - first[0] > 3;
    const since = long ? last[0] - first[0] : Date.now() / 1000 - (batch.in_progress_at ?? NaN);
    if (!(since > 0)) return { requests: null, tokens: null };
    const [requests, tokens] = long ? [last[1] - first[1], last[2] - first[2]] : [done(batch), batch.usage.output_tokens];
    return { requests: requests / since, tokens: tokens / since };
  }
}

export function endedAt(batch) {
  return batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at;
}

export function took(batch) {
  return (endedAt(batch) ?? Date.now() / 1000) - batch.created_at;
}
