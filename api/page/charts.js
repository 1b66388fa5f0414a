// Charts as SVG, drawn to the width they have, each with its numbers as a table for those who cannot see it.

import { h, s, setText, table } from "./dom.js";
import { clockTime, compact, count } from "./text.js";

const HEIGHT = 150;
const ROUND = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]];
const APART = 0.15;
const [LEFT, RIGHT, TOP, BOTTOM] = [44, 10, 14, 22];

// A figure that draws itself anew when its data or its width changes.
export class Chart {
  constructor(title, draw) {
    this.draw = draw;
    this.place = h("div", { class: "plot" });
    this.facts = h("p", { class: "facts number" });
    this.numbers = h("div", {});
    this.details = h("details", { ontoggle: () => this.list() }, h("summary", {}, "Numbers"), this.numbers);
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, h("h3", {}, title), this.facts), this.place, this.details);
    this.title = title;
    new ResizeObserver(() => this.paint()).observe(this.place);
  }

  show(data, facts) {
    setText(this.facts, facts);
    if (JSON.stringify(data) === this.shown) return;
    this.shown = JSON.stringify(data);
    this.data = data;
    this.paint();
    this.list();
  }

  paint() {
    const width = this.place.clientWidth;
    if (this.data && width) this.place.replaceChildren(this.draw(this.data, width, this.title, this));
  }

  // The table is made when somebody opens it: nobody needs eight of them with every refresh.
  list() {
    if (!this.details.open || !this.data) return;
    const { names, rows } = this.data;
    this.numbers.replaceChildren(table(this.title, names.map((title) => ({ title, kind: "number" })), rows));
  }
}

function frame(width, title, most, format) {
  const inner = { width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM };
  const top = nice(most);
  const y = (value) => TOP + inner.height * (1 - value / top);
  const lines = [0, top / 2, top].map((value) => s("g", { class: "grid" },
    s("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    s("text", { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, format(value))));
  const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": title }, lines);
  return { svg, inner, y };
}

function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

// Edges of times grow by one factor, those of whole numbers by one step: either way bars are of one width.
export function histogram({ edges, counts, marks, names, rows, format, whole }, width, title) {
  const { svg, inner, y } = frame(width, `${title}: histogram; its numbers follow`, Math.max(...counts), compact);
  const step = inner.width / counts.length;
  counts.forEach((number, place) => {
    const label = `${rows[place][0]}: ${count(number)} ${names[1].toLowerCase()}`;
    // What is there is seen, be it one of fifty thousand.
    const tall = number ? Math.max(1.5, y(0) - y(number)) : 0;
    svg.append(s("rect", { class: "bar", x: LEFT + place * step + 0.5, width: Math.max(1, step - 1), y: y(0) - tall, height: tall },
      s("title", {}, label)));
  });
  const [low, next, high] = [edges[0], edges[1], edges.at(-1)];
  const place = (value) => (whole ? (value - low) / (next - low) : Math.log(value / low) / Math.log(next / low));
  // The bar of one whole number has it in its middle.
  const x = (value) => LEFT + step * (Math.min(counts.length, Math.max(0, place(value))) + (whole && next - low === 1 ? 0.5 : 0));
  const most = Math.max(2, Math.floor(inner.width / 60));
  const ticks = whole ? evenly(low, high - 1, most, 1) : rounds(low, high, most);
  ticks.forEach((value) => label(svg, x(value), width, HEIGHT - 6, format(value)));
  mark(svg, marks, x, y, width, high);
  return svg;
}

// Round numbers of a range, evenly apart, `least` at least.
function evenly(low, high, most, least) {
  const wanted = Math.max(least, (high - low) / most);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const apart = [1, 2, 5, 10].find((one) => one * power >= wanted * 0.999) * power;
  const found = [];
  // From 0 on, not from -0, which reads "-0".
  for (let one = Math.max(0, Math.ceil(low / apart - 1e-9)); one * apart <= high * (1 + 1e-9); one += 1) found.push(one * apart);
  return found;
}

// Round numbers of a range in which each step is as many times more.
function rounds(low, high, most) {
  const first = Math.floor(Math.log10(low));
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, place) => 10 ** (first + place));
  const choices = ROUND.map((steps) => powers.flatMap((power) => steps.map((one) => one * power)).filter((one) => low <= one && one <= high));
  const tens = choices.at(-1);
  if (tens.length > most) return tens.filter((_, place) => place % Math.ceil(tens.length / most) === 0);
  return choices.find((one) => one.length > 1 && one.length <= most) ?? evenly(low, high, most, 0);
}

function label(svg, at, width, y, text, kind = "tick") {
  const half = text.length * 3.2;
  const anchor = at + half > width ? "end" : at - half < 0 ? "start" : "middle";
  svg.append(s("text", { class: kind, x: anchor === "end" ? width - 1 : at, y, "text-anchor": anchor }, text));
}

function mark(svg, marks, x, y, width, high) {
  const drawn = Object.entries(marks).filter(([, value]) => value <= high).map(([name, value]) => [name, x(value)]);
  drawn.forEach(([, at]) => svg.append(s("line", { class: "mark", x1: at, x2: at, y1: TOP, y2: y(0) })));
  labels(drawn, APART * (width - LEFT - RIGHT)).forEach(([name, at]) => label(svg, at, width, 10, name, "mark"));
}

// Marks that are too close for a label each have one, "p50–p99": the rule of jobs/report/draw.py.
export function labels(marks, apart) {
  const groups = [];
  for (const one of marks) {
    const before = groups.at(-1)?.at(-1);
    if (before && one[1] - before[1] < apart) groups.at(-1).push(one);
    else groups.push([one]);
  }
  return groups.map((group) => {
    const [[first, from], [last, to]] = [group[0], group.at(-1)];
    return [first === last ? first : `${first}–${last}`, (from + to) / 2];
  });
}

// A value that is null is of a span in which there was nothing to measure; from `open` on they may still grow.
export function overTime({ began, step, values, format, most, open }, width, title, chart) {
  const { svg, inner, y } = frame(width, `${title}: over time; its numbers follow`, most ?? Math.max(...values), format);
  const x = (place) => LEFT + (place * inner.width) / values.length;
  for (const [from, to, kind] of [[0, open, ""], [open, values.length, " open"]]) {
    const part = steps(values, from, to, x, y);
    svg.append(s("path", { class: `area${kind}`, d: part.area }), s("path", { class: `line${kind}`, d: part.line }));
  }
  const times = Math.max(1, Math.min(4, Math.floor(inner.width / 90)));
  for (let tick = 0; tick <= times; tick += 1) {
    const anchor = tick === 0 ? "start" : tick === times ? "end" : "middle";
    svg.append(s("text", { class: "tick", x: x((tick * values.length) / times), y: HEIGHT - 6, "text-anchor": anchor },
      clockTime(began + (step * values.length * tick) / times)));
  }
  follow(svg, chart, values.length, (place) => `${clockTime(began + step * place)}: ${said(values[place], format)}`, x);
  return svg;
}

export const said = (value, format) => (value === null ? "–" : format(value));

// Steps, since each value is of a whole span: lines between them would tell of what was not measured.
function steps(values, from, to, x, y) {
  let [line, area, drawn] = ["", "", false];
  for (let place = from; place < to; place += 1) {
    const value = values[place];
    if (value !== null) {
      const [left, right, top] = [x(place), x(place + 1), y(value)].map((number) => number.toFixed(1));
      line += `${drawn ? "L" : "M"}${left} ${top}H${right}`;
      area += `M${left} ${y(0)}V${top}H${right}V${y(0)}Z`;
    }
    drawn = value !== null;
  }
  return { line, area };
}

// The value under the pointer stands in the caption while it is there.
function follow(svg, chart, length, label, x) {
  const line = s("line", { class: "pointer", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  svg.append(line);
  const facts = chart.facts;
  let before = null;
  svg.addEventListener("pointermove", (event) => {
    const ratio = (event.offsetX - x(0)) / (x(length) - x(0));
    const place = Math.min(length - 1, Math.max(0, Math.floor(ratio * length)));
    before ??= facts.textContent;
    facts.textContent = label(place);
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(place + 0.5));
  });
  svg.addEventListener("pointerleave", () => {
    if (before !== null) facts.textContent = before;
    before = null;
    for (const end of ["x1", "x2"]) line.setAttribute(end, -9);
  });
}
