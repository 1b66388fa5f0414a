// What waits and who works.

import { call } from "./api.js";
import { badge } from "./status.js";
import { Table, h, setText } from "./dom.js";
import { count, duration, none, percent, plural, rate } from "./text.js";

const counts = (titles) => titles.map((title) => ({ title, kind: "right number" }));
const MODELS = [{ title: "Model" }, ...counts(["Workers", "Waiting", "With workers"]), { title: "Waiting by prompt length, tokens", kind: "wide" }];
const WORKERS = [{ title: "Worker" }, { title: "State" }, { title: "Model" }, { title: "Running batch", kind: "wide" },
  ...counts(["Held", "Prompt tokens/s", "Output tokens/s", "Prefix hits", "KV in use", "Steps of jobs", "Idle"])];
const STEPS = { plan: "checking its lines", feed: "feeding the queue", finalize: "writing its results" };
const STATES = { loading: "Loading", serving: "Serving", retiring: "Retiring", draining: "Draining" };

export class Queue {
  title = "Queue and workers";

  constructor(main) {
    this.models = new Table("Requests that wait or run, by model", MODELS);
    this.troubles = h("div", {});
    this.steps = h("p", { class: "muted" });
    this.workers = new Table("All workers", WORKERS);
    this.sum = h("p", { class: "muted" });
    this.nobody = h("p", { class: "empty" }, "No worker is there. Start one: ",
      h("code", {}, "celery -A worker worker"), " on a GPU node with the server's LONGHAUL_ variables.");
    this.places = { models: h("div", {}, h("p", { class: "muted" }, "Loading…")), workers: h("div", {}) };
    main.replaceChildren(h("h1", { tabindex: "-1" }, "Queue and workers"),
      h("section", { "aria-labelledby": "queue-title" }, h("h2", { id: "queue-title" }, "Your requests"), this.places.models),
      h("section", { "aria-labelledby": "workers-title" }, h("h2", { id: "workers-title" }, "Workers"), this.places.workers));
  }

  close() {}

  async load(signal) {
    const [queue, workers] = await Promise.all([call("queue", { signal }), call("workers", { signal })]);
    this.showQueue(queue);
    this.showWorkers(workers.data);
  }

  hear(name, data) {
    if (name === "queue") this.showQueue(data);
    if (name === "workers") this.showWorkers(data.data);
  }

  showQueue({ models, control, failing }) {
    this.models.show(models.map((one) => [one.model, count(one.workers), count(one.queued), count(one.leased), buckets(one.buckets)]));
    setText(this.steps, control ? `${plural(control, "step")} of your jobs to do: checking lines, feeding the queue, writing results.`
      : "No job of yours has anything else to do.");
    const troubles = [
      ...models.filter((one) => one.reason).map((one) => [h("b", {}, one.model), ` could not be loaded by a worker: ${one.reason}`]),
      ...failing.map((one) => [h("a", { href: `#/job/${one.batch}` }, one.batch),
        ` ${STEPS[one.unit] ?? one.unit} failed ${plural(one.failures, "time")} in a row and is tried again: ${one.reason}`]),
    ];
    this.troubles.replaceChildren(...troubles.map((words) => h("p", { class: "trouble" }, words)));
    place(this.places.models, [this.models.element, this.troubles, this.steps]);
  }

  showWorkers(workers) {
    if (!workers.length) {
      place(this.places.workers, [this.nobody]);
      return;
    }
    const sum = (name) => workers.reduce((all, one) => all + one[name], 0);
    setText(this.sum, `${plural(workers.length, "worker")}, running ${plural(sum("running"), "request")} of all users: `
      + `${rate(sum("output_tokens_per_second"))} output tokens a second.`);
    this.workers.show(workers.map((one) => [one.id, state(one.state), one.model ?? "none: jobs' steps only", load(one), count(one.held),
      rate(one.prompt_tokens_per_second), rate(one.output_tokens_per_second), share(one.prefix_hit_ratio), share(one.kv_usage_ratio),
      count(one.units), one.held || one.units ? none : duration(one.idle_seconds)]));
    place(this.places.workers, [this.sum, this.workers.element]);
  }
}

// What is there already stays: taking it out would take its focus.
function place(where, elements) {
  if (where.firstChild !== elements[0]) where.replaceChildren(...elements);
}

const share = (ratio) => (ratio === null ? none : percent(ratio, 1));

function state(name) {
  const shown = badge(name === "serving" ? "in_progress" : "validating");
  shown.lastChild.textContent = STATES[name] ?? name;
  return shown;
}

function load({ running, capacity }) {
  return h("div", { class: "progress" },
    h("progress", { max: Math.max(1, capacity), value: Math.min(running, capacity), "aria-label": "Requests running" }),
    h("span", { class: "number" }, `${count(running)} of ${count(capacity)}`));
}

function buckets(found) {
  const entries = Object.entries(found).sort((a, b) => a[0] - b[0]);
  if (!entries.length) return "–";
  return h("ul", { class: "chips" }, entries.map(([bound, waiting]) =>
    h("li", {}, `to ${count(Number(bound))}: `, h("b", {}, count(waiting)))));
}
