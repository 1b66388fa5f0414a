// What waits and who works.

import { call } from "./api.js";
import { badge } from "./status.js";
import { h, table } from "./dom.js";
import { clockTime, count, plural, utc } from "./text.js";

const STEPS = { plan: "checking its lines", feed: "feeding the queue", finalize: "writing its results" };
const STATES = { loading: "Loading", serving: "Serving", retiring: "Retiring", draining: "Draining" };

export class Queue {
  title = "Queue and workers";

  constructor(main) {
    this.models = h("div", {}, h("p", { class: "muted" }, "Loading…"));
    this.workers = h("div", {});
    main.replaceChildren(h("h1", { tabindex: "-1" }, "Queue and workers"),
      h("section", { "aria-labelledby": "queue-title" }, h("h2", { id: "queue-title" }, "Your requests"), this.models),
      h("section", { "aria-labelledby": "workers-title" }, h("h2", { id: "workers-title" }, "Workers"), this.workers));
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
    const columns = [{ title: "Model" }, { title: "Workers", kind: "right number" }, { title: "Waiting", kind: "right number" }, { title: "With workers", kind: "right number" },
      { title: "Waiting by prompt length, tokens", kind: "wide" }];
    const rows = models.map((one) => [one.model, count(one.workers), count(one.queued), count(one.leased), buckets(one.buckets)]);
    const steps = control ? `${plural(control, "step")} of your jobs to do: checking lines, feeding the queue, writing results.`
      : "No job of yours has anything else to do.";
    const troubles = [
      ...models.filter((one) => one.reason).map((one) => [h("b", {}, one.model), ` could not be loaded by a worker: ${one.reason}`]),
      ...failing.map((one) => [h("a", { href: `#/job/${one.batch}` }, one.batch),
        ` ${STEPS[one.unit] ?? one.unit} failed ${plural(one.failures, "time")} in a row and is tried again: ${one.reason}`]),
    ];
    this.models.replaceChildren(table("Requests that wait or run, by model", columns, rows),
      ...troubles.map((words) => h("p", { class: "trouble" }, words)), h("p", { class: "muted" }, steps));
  }

  showWorkers(workers) {
    if (!workers.length) {
      this.workers.replaceChildren(h("p", { class: "empty" }, "No worker is there. Start one: ",
        h("code", {}, "celery -A worker worker"), " with the settings of this API, or ", h("code", {}, "longhaul up"), "."));
      return;
    }
    const held = workers.reduce((sum, one) => sum + one.held, 0);
    const columns = [{ title: "Worker" }, { title: "State" }, { title: "Model" }, { title: "Requests", kind: "wide" },
      { title: "Steps of jobs", kind: "right number" }, { title: "Idle since", kind: "right number" }];
    const rows = workers.map((one) => [one.name, state(one.state), one.model ?? "none: jobs' steps only", load(one),
      count(one.units), one.idle_since === null ? "–" : h("time", { title: utc(one.idle_since) }, clockTime(one.idle_since))]);
    this.workers.replaceChildren(h("p", { class: "muted" },
      `${plural(workers.length, "worker")}, with ${plural(held, "request")} of all users.`), table("All workers", columns, rows));
  }
}

function state(name) {
  const shown = badge(name === "serving" ? "in_progress" : "validating");
  shown.lastChild.textContent = STATES[name] ?? name;
  return shown;
}

function load({ held, capacity }) {
  return h("div", { class: "progress" },
    h("progress", { max: Math.max(1, capacity), value: Math.min(held, capacity), "aria-label": "Requests held" }),
    h("span", { class: "number" }, `${count(held)} held · runs ${count(capacity)} at once`));
}

function buckets(found) {
  const entries = Object.entries(found).sort((a, b) => a[0] - b[0]);
  if (!entries.length) return "–";
  return h("ul", { class: "chips" }, entries.map(([bound, waiting]) =>
    h("li", {}, `to ${count(Number(bound))}: `, h("b", {}, count(waiting)))));
}
