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

// A table whose wide content scrolls by itself; the region can be reached and scrolled by keyboard.
export function table(caption, columns, rows) {
  const head = columns.map(({ title, kind }) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell, place) =>
    place === 0 ? h("th", { scope: "row", class: columns[0].kind }, cell)
      : h("td", { class: columns[place].kind }, cell))));
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h("table", {}, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
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
