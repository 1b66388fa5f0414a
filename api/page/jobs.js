// The list of jobs: a page of fifty at a time, so that ten thousand weigh no more than fifty.

import { call, urlOption } from "./api.js";
import { announce, h } from "./dom.js";
import { Row } from "./row.js";
import { ended, word } from "./status.js";

const PAGE = 50;
const COLUMNS = [["Job", "what"], ["Status", "beside"], ["Progress", "wide"], ["Failed", "right roomy"],
  ["Output tokens", "right roomy"], ["Created", "right roomy"], ["Took", "right roomy"]];

export class Jobs {
  title = "Jobs";

  constructor(main, parameters) {
    this.after = parameters.get("after");
    this.rows = new Map();
    this.body = h("tbody", {});
    this.table = h("table", { class: "jobs" }, h("caption", { class: "hidden" }, "Jobs, newest first"),
      h("thead", {}, h("tr", {}, COLUMNS.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)))), this.body);
    this.pages = h("nav", { class: "pages", "aria-label": "Pages of jobs" });
    this.place = h("div", {}, h("p", { class: "muted" }, "Loading…"));
    main.replaceChildren(h("h1", { tabindex: "-1" }, "Jobs"), this.place);
    this.timer = setInterval(() => this.rows.forEach((row) => ended(row.batch) || row.tick()), 1000);
  }

  close() {
    clearInterval(this.timer);
  }

  async load(signal) {
    const after = this.after ? `&after=${encodeURIComponent(this.after)}` : "";
    const [page, queue] = await Promise.all([call(`batches?limit=${PAGE}${after}`, { signal }), call("queue", { signal })]);
    this.queue = queue;
    if (!page.data.length && !this.after) {
      await this.welcome(signal);
      return;
    }
    this.rows = new Map(page.data.map((batch) => [batch.id, this.rows.get(batch.id) ?? new Row(batch)]));
    page.data.forEach((batch) => this.rows.get(batch.id).show(batch));
    this.showWaiting();
    this.body.replaceChildren(...[...this.rows.values()].map((row) => row.element));
    this.pages.replaceChildren(...[
      this.after ? h("a", { href: "#/" }, "Newest") : null,
      page.has_more ? h("a", { href: `#/?after=${encodeURIComponent(page.last_id)}`, rel: "next" }, "Older jobs") : null,
    ].filter(Boolean));
    const body = page.data.length ? this.table : h("p", { class: "empty" }, "There are no older jobs.");
    if (this.place.firstChild !== body) this.place.replaceChildren(body, this.pages);
  }

  async welcome(signal) {
    const models = await call("models", { signal }).catch(() => ({ data: [] }));
    const model = models.data[0]?.id ?? "MODEL";
    const line = { custom_id: "a", method: "POST", url: "/v1/chat/completions",
      body: { model, messages: [{ role: "user", content: "Name three rivers." }] } };
    this.rows = new Map();
    this.place.replaceChildren(h("section", { class: "card welcome" },
      h("h2", {}, "No jobs yet"),
      h("p", {}, "Write requests into a file, one a line:"), h("pre", { tabindex: "0" }, h("code", {}, JSON.stringify(line))),
      h("p", {}, "Then submit it. The job appears here at once:"),
      h("pre", { tabindex: "0" }, h("code", {}, `longhaul submit prompts.jsonl --watch${urlOption()}`))));
  }

  showWaiting() {
    this.rows.forEach((row) => row.wait(this.queue));
  }

  hear(name, batch) {
    if (name === "queue") {
      this.queue = batch;
      this.showWaiting();
    }
    if (name === "gone") {
      this.rows.get(batch.id)?.element.remove();
      this.rows.delete(batch.id);
    }
    if (name !== "batch") return;
    const row = this.rows.get(batch.id);
    if (row) {
      const before = row.batch.status;
      row.show(batch);
      row.wait(this.queue);
      if (before !== batch.status) announce(`Job ${batch.id.slice(-8)}: ${word(batch.status)}.`);
    } else if (!this.after && batch.id > (this.newest() ?? "")) this.add(batch);
  }

  newest() {
    return this.rows.keys().next().value;
  }

  add(batch) {
    announce(`New job ${batch.id.slice(-8)}.`);
    if (!this.rows.size) {
      this.load();
      return;
    }
    const row = new Row(batch);
    row.wait(this.queue);
    this.rows = new Map([[batch.id, row], ...this.rows]);
    this.body.prepend(row.element);
    for (const [id, old] of [...this.rows].slice(PAGE)) {
      old.element.remove();
      this.rows.delete(id);
    }
  }
}
