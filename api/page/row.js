// A job's row in the list.

import { h, setAttribute, setText } from "./dom.js";
import { reason } from "./faults.js";
import { Progress, badge, idText, nameOf, took } from "./status.js";
import { compact, count, duration, moment, none, utc } from "./text.js";
import { said, waits } from "./waiting.js";

export class Row {
  constructor(batch) {
    this.progress = new Progress("Requests done");
    this.status = h("td", { class: "beside" });
    this.narrow = h("div", { class: "narrow" });
    this.faults = h("div", { class: "narrow bad" });
    this.reason = h("div", { class: "reason bad" });
    this.waiting = h("div", { class: "reason waits" });
    this.failed = h("td", { class: "right roomy number" });
    this.tokens = h("td", { class: "right roomy number" });
    this.took = h("td", { class: "right roomy number" });
    const made = () => h("time", { datetime: new Date(batch.created_at * 1000).toISOString(), title: utc(batch.created_at) },
      moment(batch.created_at));
    this.model = h("span", {});
    const name = nameOf(batch);
    this.element = h("tr", {},
      h("th", { scope: "row", class: "what" }, h("a", { href: `#/job/${batch.id}` }, idText(batch.id)),
        h("div", { class: "under" }, name ? h("b", {}, name) : null, this.model, h("span", { class: "narrow" }, made()))),
      this.status, h("td", { class: "wide" }, this.narrow, this.progress.element, this.waiting, this.faults, this.reason),
      this.failed, this.tokens, h("td", { class: "right roomy number" }, made()), this.took);
    this.show(batch);
  }

  show(batch) {
    if (this.batch?.status !== batch.status) {
      this.status.replaceChildren(badge(batch.status));
      this.narrow.replaceChildren(badge(batch.status));
    }
    this.batch = batch;
    this.progress.show(batch);
    const { failed, total } = batch.request_counts;
    setText(this.model, batch.model ?? batch.endpoint);
    const invalid = batch.errors ? reason(batch.errors) : "";
    setText(this.reason, invalid);
    setAttribute(this.reason, "title", invalid || null);
    setText(this.failed, invalid && !total ? none : count(failed));
    setText(this.faults, failed ? `${count(failed)} failed` : "");
    this.failed.classList.toggle("bad", failed > 0);
    setText(this.tokens, batch.usage.output_tokens ? compact(batch.usage.output_tokens) : "0");
    this.tick();
  }

  // Why it stands still, if it does.
  wait(queue) {
    const words = said(waits(this.batch, queue));
    setText(this.waiting, words);
    setAttribute(this.waiting, "title", words || null);
    for (const place of [this.status, this.narrow]) place.classList.toggle("still", Boolean(words));
  }

  tick() {
    setText(this.took, duration(took(this.batch)));
  }
}
