// One job: how far it is, how it went, what it made.

import { ApiError, call } from "./api.js";
import { announce, h, setText } from "./dom.js";
import { Faults } from "./faults.js";
import { Files } from "./files.js";
import { Profile } from "./profile.js";
import { Pace, Progress, badge, done, ended, endedAt, nameOf, took, word } from "./status.js";
import { duration, fullMoment, percent, utc } from "./text.js";
import { Tiles } from "./tiles.js";
import { Waiting, said, waits } from "./waiting.js";

const PROFILE_MS = 3000;

export class Job {
  constructor(main, id) {
    this.id = id;
    this.title = `Job ${id.slice(-8)}`;
    this.pace = new Pace();
    this.progress = new Progress("Requests done");
    this.status = h("span", {});
    this.name = h("p", {});
    this.under = h("p", { class: "muted" });
    this.waiting = new Waiting();
    this.tiles = new Tiles();
    this.profile = new Profile();
    this.faults = new Faults();
    this.details = h("dl", { class: "details" });
    this.cancel = h("button", { class: "danger", hidden: true, onclick: () => this.dialog.showModal() }, "Cancel job");
    this.dialog = this.confirmation();
    this.files = new Files();
    this.body = [
      h("div", { class: "heading" }, h("div", {}, h("h1", { tabindex: "-1", class: "id-title" }, id), this.name), this.cancel),
      h("section", { class: "card summary", "aria-label": "Progress" },
        h("div", { class: "line" }, this.status, this.progress.element), this.waiting.element, this.under, this.tiles.element),
      this.files.element, this.faults.element, this.profile.element,
      h("section", { "aria-labelledby": "about-title" }, h("h2", { id: "about-title" }, "About this job"), this.details), this.dialog,
    ];
    this.main = main;
    this.loading = h("p", { class: "muted" }, "Loading…");
    main.replaceChildren(this.body[0], this.loading);
    this.timer = setInterval(() => this.tick(), 1000);
  }

  close() {
    clearInterval(this.timer);
    clearTimeout(this.next);
    this.closed = true;
  }

  async load(signal) {
    // A path of dots would lead elsewhere.
    if (/^\.*$/.test(this.id)) throw new ApiError(404, `No such job: ${this.id}`);
    this.path = `batches/${encodeURIComponent(this.id)}`;
    const [batch, queue] = await Promise.all([call(this.path, { signal }), call("queue", { signal })]);
    this.queue = queue;
    // The heading stays where it is: it has the focus.
    if (this.loading.isConnected) this.loading.replaceWith(...this.body.slice(1));
    else if (!this.body[1].isConnected) this.main.replaceChildren(...this.body);
    this.show(batch);
    await this.loadProfile(signal);
  }

  hear(name, data) {
    if (name === "queue") {
      this.queue = data;
      this.tick();
    }
    if (data.id !== this.id) return;
    if (name === "gone") throw new ApiError(404, "This job was deleted.");
    if (name === "batch") {
      this.show(data);
      this.next ??= setTimeout(() => this.loadProfile().catch(() => {}), ended(data) ? 0 : PROFILE_MS);
    }
  }

  show(batch) {
    const before = this.batch;
    this.batch = batch;
    this.pace.add(batch);
    if (before?.status !== batch.status) this.status.replaceChildren(badge(batch.status));
    if (before && before.status !== batch.status) announce(`Job ${word(batch.status)}.`);
    else if (before && quarter(before) !== quarter(batch)) announce(`${percent(done(batch), batch.request_counts.total)} done.`);
    this.progress.show(batch);
    this.cancel.hidden = !["validating", "in_progress"].includes(batch.status);
    if (this.cancel.hidden && this.dialog.open) this.dialog.close();
    this.files.show(batch);
    setText(this.name, nameOf(batch));
    this.showDetails();
    if (batch.errors) this.faults.showLines(batch.errors.data);
    this.tick();
  }

  tick() {
    const { batch, pace, summary } = this;
    if (!batch || this.closed) return;
    const over = ended(batch);
    const words = over ? `${word(batch.status)} after ${duration(took(batch))}.` : `Submitted ${duration(took(batch))} ago.`;
    const model = batch.model ?? (over ? null : "Model not known yet");
    setText(this.under, [model, batch.endpoint, words].filter(Boolean).join(" · "));
    this.tiles.show(batch, { pace, summary, waits: this.showWaiting() });
  }

  showWaiting() {
    const reason = waits(this.batch, this.queue);
    if (reason && reason !== this.waited) announce(`${said(reason)}.`);
    this.waited = reason;
    this.waiting.show(reason);
    this.status.classList.toggle("still", Boolean(reason));
    return reason;
  }

  async loadProfile(signal) {
    clearTimeout(this.next);
    this.next = undefined;
    const { batch } = this;
    if (!batch.in_progress_at && !done(batch)) return;
    const over = ended(batch);
    const [profile, summary] = await Promise.all([call(`${this.path}/profile`, { signal }), over ? call(`${this.path}/metrics`, { signal }) : null]);
    if (this.closed) return;
    this.summary = summary?.latency ? summary : null;
    this.profile.show(profile, this.summary, batch.request_counts.total - done(batch));
    this.faults.showRequests(profile.errors, batch.request_counts.failed);
    this.tick();
    const more = profile.parts_read < profile.parts;
    if (more) this.next = setTimeout(() => this.loadProfile().catch(() => {}), 1000);
  }

  showDetails() {
    const { batch } = this;
    const times = [["Created", batch.created_at], ["Began to run", batch.in_progress_at], ["Finalizing since", batch.finalizing_at],
      ["Cancelled at", batch.cancelling_at], ["Ended", endedAt(batch)], [ended(batch) ? "Would have expired" : "Expires", batch.expires_at]];
    const facts = [["Input file", h("code", {}, batch.input_file_id)], ["Completion window", batch.completion_window],
      ...times.filter(([, at]) => at).map(([name, at]) => [name, h("time", { datetime: new Date(at * 1000).toISOString(), title: utc(at) }, fullMoment(at))]),
      ...Object.entries(batch.metadata ?? {}).map(([name, value]) => [h("span", {}, "Metadata ", h("code", {}, name)), value])];
    const shown = JSON.stringify([batch.status, batch.metadata, times]);
    if (shown === this.detailed) return;
    this.detailed = shown;
    this.details.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  confirmation() {
    const problem = h("p", { class: "bad", role: "alert" });
    const button = h("button", { class: "danger", onclick: async () => {
      button.disabled = true;
      try {
        this.show(await call(`${this.path}/cancel`, { method: "POST" }));
        dialog.close();
        this.main.querySelector("h1").focus();
      } catch (error) {
        problem.textContent = error.message;
      }
      button.disabled = false;
    } }, "Cancel job");
    const dialog = h("dialog", { "aria-labelledby": "cancel-title" }, h("h2", { id: "cancel-title" }, "Cancel this job?"),
      h("p", {}, "What has finished is kept. The rest will not run, and the job cannot go on later."), problem,
      h("div", { class: "buttons" }, h("button", { class: "quiet", autofocus: true, onclick: () => dialog.close() }, "Let it run"), button));
    return dialog;
  }
}

const quarter = (batch) => Math.floor((4 * done(batch)) / Math.max(1, batch.request_counts.total));
