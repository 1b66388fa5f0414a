// Elements, made by code: text is only ever text, so nothing that a job says can become HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Changing what is the same would make screen readers and selections lose their place.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// A table whose wide content scrolls by itself; the region can be reached and scrolled by keyboard. Where the screen
// is narrow, three columns and more, if nothing else is said, become lines with labels: roles are named, as what is
// laid out so has none.
export class Table {
  constructor(caption, columns, stacks = columns.length > 2) {
    this.caption = caption;
    this.columns = columns;
    this.body = h("tbody", { role: "rowgroup" });
    const head = columns.map(({ title, kind }) => h("th", { scope: "col", role: "columnheader", class: kind }, title));
    this.element = h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
      h("table", { role: "table", class: stacks ? "stacks" : null }, h("caption", { class: "hidden" }, caption),
        h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)), this.body));
  }

  // The region stays: it may have the focus, and has been scrolled.
  show(rows) {
    const made = rows.map((cells) => h("tr", { role: "row" }, cells.map((cell, place) => this.cell(cell, place))));
    const same = made.length === this.body.children.length && made.every((row, place) => row.isEqualNode(this.body.children[place]));
    if (!same) this.body.replaceChildren(...made);
  }

  cell(content, place) {
    const { title, kind } = this.columns[place];
    if (place === 0) return h("th", { scope: "row", role: "rowheader", class: kind, "data-label": title }, content);
    return h("td", { role: "cell", class: kind, "data-label": title }, content);
  }
}

export function table(caption, columns, rows) {
  const made = new Table(caption, columns);
  made.show(rows);
  return made.element;
}

let said = 0;
let next = null;

// At most one sentence every eight seconds, the newest; what is said faster nobody can hear.
export function announce(text) {
  const waiting = next !== null;
  next = text;
  if (waiting) return;
  setTimeout(() => {
    document.getElementById("announcer").textContent = next;
    said = Date.now();
    next = null;
  }, Math.max(50, said + 8000 - Date.now()));
}
