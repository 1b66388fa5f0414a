// What went wrong: lines of the input that are no requests, and requests that failed.

import { Table, h, setText } from "./dom.js";
import { count, none, plural } from "./text.js";

const FEW = 5;
const LINES = [{ title: "Line", kind: "number" }, { title: "Code" }, { title: "Message", kind: "message" }];
const REQUESTS = [{ title: "Request", kind: "number" }, { title: "custom_id", kind: "message custom" }, { title: "Code" },
  { title: "Message", kind: "message" }];

export class Faults {
  constructor() {
    this.title = h("h2", { id: "faults-title" });
    this.words = h("p", {});
    this.codes = h("ul", { class: "chips" });
    this.place = h("div", {});
    this.button = h("button", { onclick: () => this.toggle() });
    this.note = h("p", { class: "muted" });
    this.element = h("section", { class: "faults", "aria-labelledby": "faults-title", hidden: true },
      this.title, this.words, this.codes, this.place, this.button, this.note);
    this.all = false;
  }

  // Errors in the lines of the input file, which fail a job before anything runs.
  showLines(errors) {
    setText(this.title, "Errors in the input");
    setText(this.words, `Nothing ran: ${plural(errors.length, "error")} in the input. Correct the file and submit it again.`);
    this.show("Errors in the input, by line", LINES, errors.map((one) => [one.line === null ? none : count(one.line),
      code(one.code, one.param), one.message]));
  }

  // Requests that have an error line, by code and one by one.
  showRequests({ by_code: codes, first }, failed) {
    if (!first.length) return;
    setText(this.title, "Errors");
    this.codes.replaceChildren(...Object.entries(codes).map(([name, number]) => h("li", {}, h("code", {}, name), " ", h("b", {}, count(number)))));
    setText(this.note, (first.length < failed ? `${count(first.length)} of ${count(failed)} are listed; the error file has all. ` : "")
      + "A request's number is that of its line, blank lines not counted.");
    this.show("Requests that failed", REQUESTS, first.map((one) => [count(one.request), h("code", {}, one.custom_id),
      code(one.code), one.message]));
  }

  show(caption, columns, rows) {
    this.element.hidden = false;
    if (this.table?.caption !== caption) {
      this.table = new Table(caption, columns);
      this.place.replaceChildren(this.table.element);
    }
    this.rows = rows;
    this.list();
  }

  toggle() {
    this.all = !this.all;
    this.list();
    // Whoever asked for all can scroll through them by keyboard at once.
    if (this.all) this.table.element.focus();
  }

  list() {
    this.table.show(this.all ? this.rows : this.rows.slice(0, FEW));
    this.table.element.classList.toggle("tall", this.all);
    this.button.hidden = this.rows.length <= FEW;
    setText(this.button, this.all ? `Show the first ${FEW} only` : `Show all ${count(this.rows.length)}`);
    this.button.setAttribute("aria-expanded", String(this.all));
  }
}

// In one line: why a job failed before it ran.
export function reason({ data }) {
  const [{ line, message, code: name }] = data;
  const place = line === null ? "" : `line ${count(line)}: `;
  const more = data.length > 1 ? ` (and ${count(data.length - 1)} more)` : "";
  return `Invalid input: ${place}${message || name}${more}`;
}

const code = (name, parameter) => h("span", {}, h("code", { class: "bad" }, name), parameter ? h("span", { class: "muted" }, ` ${parameter}`) : null);
