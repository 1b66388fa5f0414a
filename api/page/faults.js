// What went wrong: lines of the input that are no requests, and requests that failed.

import { h, table } from "./dom.js";
import { count, plural } from "./text.js";

const MOST = 200;

// Errors in the lines of the input file, which fail a job before anything runs.
export function lineFaults(errors) {
  const columns = [{ title: "Line", kind: "number" }, { title: "Code" }, { title: "Message", kind: "message" }, { title: "Parameter" }];
  const rows = errors.slice(0, MOST).map((one) => [one.line === null ? "–" : count(one.line), h("code", {}, one.code), one.message, one.param ?? "–"]);
  return h("section", { "aria-labelledby": "lines-title" },
    h("h2", { id: "lines-title" }, "Errors in the input"),
    h("p", {}, `Nothing ran: ${plural(errors.length, "line")} of the input ${errors.length === 1 ? "has an error" : "have errors"}. Correct the file and submit it again.`),
    table("Errors in the input, by line", columns, rows),
    errors.length > MOST ? h("p", { class: "muted" }, `The first ${MOST} of ${count(errors.length)}.`) : null);
}

// Requests that have an error line, by code and one by one.
export function requestFaults({ by_code: codes, first }, failed) {
  const most = Math.max(...Object.values(codes));
  const bars = Object.entries(codes).map(([code, number]) => [h("code", {}, code),
    h("div", { class: "progress" }, h("progress", { class: "some-failed", max: most, value: number, "aria-label": "Share of the most frequent" }), h("span", { class: "number" }, count(number)))]);
  const columns = [{ title: "Request", kind: "number" }, { title: "custom_id", kind: "message" }, { title: "Code" }, { title: "Message", kind: "message" }];
  const rows = first.map((one) => [count(one.request), h("code", {}, one.custom_id), h("code", {}, one.code), one.message]);
  return h("section", { "aria-labelledby": "errors-title" },
    h("h2", { id: "errors-title" }, "Errors"),
    table("Errors by code", [{ title: "Code" }, { title: "Requests", kind: "wide" }], bars),
    h("p", { class: "muted" }, first.length < failed ? `${count(first.length)} of ${count(failed)}; the error file has all. ` : "",
      "A request's number is that of its line, blank lines not counted."),
    table("Requests that failed", columns, rows));
}
