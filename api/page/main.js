// Shows the view that the address names, keeps it fresh, and says so when it cannot.

import { call, key } from "./api.js";
import { announce, h, setText } from "./dom.js";
import { Events } from "./events.js";
import { Job } from "./job.js";
import { Jobs } from "./jobs.js";
import { AskKey } from "./key.js";
import { Queue } from "./queue.js";
import { clockTime } from "./text.js";

const main = document.getElementById("main");
const notice = document.getElementById("notice");
const live = document.getElementById("live");
let view = null;
let loading = null;
let awaySince = null;
let awayReason = null;
let retry = null;

function route() {
  const [path, query] = location.hash.slice(1).split("?");
  const [, page, id] = (path || "/").split("/");
  const parameters = new URLSearchParams(query ?? "");
  if (page === "job" && id) return ["jobs", () => new Job(main, decoded(id))];
  if (page === "queue") return ["queue", () => new Queue(main)];
  return ["jobs", () => new Jobs(main, parameters)];
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
  load();
}

async function load() {
  loading?.abort();
  clearTimeout(retry);
  loading = new AbortController();
  const { signal } = loading;
  try {
    await view.load(signal);
    if (!signal.aborted) setAway(null);
  } catch (error) {
    if (!signal.aborted) failed(error);
  }
}

function failed(error) {
  if (error.status === 401) askKey(error.message);
  else if (error.status === 404 || error.status === 400) {
    main.replaceChildren(h("h1", { tabindex: "-1" }, "Not found"), h("p", { class: "empty" }, error.message, " ", h("a", { href: "#/" }, "All jobs")));
  } else {
    if (error.status === undefined) console.error(error);
    setAway(error.message);
    retry = setTimeout(load, 1000 * (error.retrySeconds ?? 5));
  }
}

function askKey(message) {
  events.stop();
  setText(live, "");
  show(new AskKey(main, message, () => {
    open();
    events.start();
  }));
}

function setAway(reason) {
  if (reason === awayReason) return;
  if (reason && awaySince === null) awaySince = Date.now() / 1000;
  if (reason) {
    notice.replaceChildren(h("p", { class: "notice" }, h("b", {}, reason), ` Shown is what was known at ${clockTime(awaySince)}. Trying again.`));
  } else {
    notice.replaceChildren();
    announce("Connected again.");
    awaySince = null;
  }
  awayReason = reason;
}

function state(name, error) {
  live.className = `live ${name}`;
  setText(live, { live: "Live", away: "Reconnecting…", refused: "" }[name]);
  if (name === "live" && awayReason) load();
  if (name === "away") setAway(error.status ? error.message : "The API does not answer.");
  if (name === "refused") askKey(error.message);
}

function hear(name, data) {
  if (name === "reset") load();
  else if (name === "status") {
    if (data.reachable) load();
    else setAway("The queue or the store does not answer at the moment.");
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
