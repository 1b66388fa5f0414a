// Shows the view that the address names, keeps it fresh, and says so when it cannot.

import { SILENT, key } from "./api.js";
import { Events } from "./events.js";
import { Health } from "./health.js";
import { Job } from "./job.js";
import { Jobs } from "./jobs.js";
import { AskKey } from "./key.js";
import { NoView } from "./none.js";
import { Queue } from "./queue.js";

const main = document.getElementById("main");
const health = new Health();
let view = null;
let loading = null;
let retry = null;

function route() {
  const [path, query] = location.hash.slice(1).split("?");
  const [top, page, ...rest] = (path || "/").split("/");
  const parameters = new URLSearchParams(query ?? "");
  if (page === "job" && rest[0]) return ["jobs", () => new Job(main, decoded(rest.join("/")))];
  if (page === "queue" && !rest.length) return ["queue", () => new Queue(main)];
  if (top === "" && !page && !rest.length) return ["jobs", () => new Jobs(main, parameters)];
  return [null, () => new NoView(main)];
}

// Whoever types an address may leave a percent sign alone.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function open(first = false) {
  const [page, make] = route();
  for (const link of document.querySelectorAll("nav a[data-page]")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  show(make());
  if (!first) {
    window.scrollTo(0, 0);
    main.querySelector("h1")?.focus();
  }
}

function show(made) {
  view?.close();
  view = made;
  document.title = `${view.title} · Longhaul`;
  document.getElementById("forget").hidden = !key.get();
  health.opened();
  load();
}

async function load() {
  loading?.abort();
  clearTimeout(retry);
  loading = new AbortController();
  const { signal } = loading;
  try {
    await view.load(signal);
    if (!signal.aborted) health.loaded();
  } catch (error) {
    if (!signal.aborted) failed(error);
  }
}

function failed(error) {
  if (error.status === 401) askKey(error);
  else if (error.status === 404 || error.status === 400) {
    health.set({ load: null });
    // The view stays: the next event may find it there.
    new NoView(main, error.message);
  } else {
    if (error.status === undefined) console.error(error);
    health.set({ load: error.problem ?? error.message });
    retry = setTimeout(load, 1000 * (error.retrySeconds ?? 5));
  }
}

function askKey(error) {
  events.stop();
  health.forget();
  // Both the view and the stream are refused; the second must not take away what was typed.
  if (view instanceof AskKey) return;
  const had = key.get();
  key.forget();
  show(new AskKey(main, error, had, () => {
    open();
    events.start();
  }));
}

function state(name, error) {
  if (name === "refused") askKey(error);
  else if (name === "live") {
    const again = health.reason;
    health.set({ connected: true, stream: null });
    if (again) load();
  } else {
    health.set({ connected: false, stream: error.status ? error.problem : SILENT });
    // It answers, but has no stream for this page: look now and then.
    if (error.status) load();
  }
}

function hear(name, data) {
  if (name === "reset" || name === "status") {
    health.set({ servers: data.reachable ? null : "The queue or the store does not answer at the moment." });
    if (data.reachable || name === "reset") load();
  } else {
    try {
      view.hear(name, data);
    } catch (error) {
      failed(error);
    }
  }
}

const events = new Events(hear, state);

window.addEventListener("hashchange", () => open());
// A link to it would be the address of a view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
document.querySelector(".find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = event.target.elements.id.value.trim();
  if (id) location.hash = `#/job/${encodeURIComponent(id)}`;
  event.target.reset();
});

open(true);
events.start();
