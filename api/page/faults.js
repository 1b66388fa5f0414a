// What went wrong: lines of the input that are no requests, and requests that failed.

import { h, table } from "./dom.js";
import { count, plural } from "./text.js";

const MOST = 200;

// Errors in the lines of the input file, which fail a job before anything runs.
export function lineFaults(errors) {
  const rows = errors.slice(0, MOST).map((one) => [one.line === null ? "–" : count(one.line),
    fault(one.code, one.message, one.param)]);
  return h("section", { "aria-labelledby": "lines-title" },
    h("h2", { id: "lines-title" }, "Errors in the input"),
    h("p", {}, `Nothing ran: ${plural(errors.length, "line")} of the input ${errors.length === 1 ? "has an error" : "have errors"}. `,
      "Correct the file and submit it again."),
    table("Errors in the input, by line", [{ title: "Line", kind: "number" }, { title: "Error", kind: "message" }], rows),
    errors.length > MOST ? h("p", { class: "muted" }, `The first ${MOST} of ${count(errors.length)}.`) : null);
}

// Requests that have an error line, by code and one by one.
export function requestFaults({ by_code: codes, first }, failed) {
  const chips = Object.entries(codes).map(([code, number]) => h("li", {}, h("code", {}, code), " ", h("b", {}, count(number))));
  const rows = first.map((one) => [h("span", {}, count(one.request), h("div", { class: "under" }, h("code", {}, one.custom_id))),
    fault(one.code, one.message)]);
  const shown = table("Requests that failed", [{ title: "Request", kind: "number request" }, { title: "Error", kind: "message" }], rows);
  shown.classList.add("low");
  return h("section", { "aria-labelledby": "errors-title" },
    h("h2", { id: "errors-title" }, "Errors"), h("ul", { class: "chips" }, chips), shown,
    h("p", { class: "muted" }, first.length < failed ? `${count(first.length)} of ${count(failed)}; the error file has all. ` : "",
      "A request's number is that of its line, blank lines not counted."));
}

function fault(code, message, parameter) {
  return h("span", {}, h("code", { class: "bad" }, code), parameter ? h("span", { class: "muted" }, ` ${parameter}`) : null,
    h("div", {}, message));
}
