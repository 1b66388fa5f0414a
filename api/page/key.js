// Asks for the API key. It is kept until the tab is closed.

import { key } from "./api.js";
import { h } from "./dom.js";

export class AskKey {
  title = "API key";

  constructor(main, message, opened) {
    const input = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true,
      "aria-describedby": "key-help" });
    const form = h("form", { class: "card key", onsubmit: (event) => {
      event.preventDefault();
      key.set(input.value.trim());
      opened();
    } },
    h("h1", { tabindex: "-1" }, "API key"),
    h("p", { class: key.get() ? "bad" : "" }, message),
    h("label", { for: "key" }, "Key"), input,
    h("p", { class: "muted", id: "key-help" }, "An administrator makes one: ", h("code", {}, "longhaul keys create TENANT"),
      ". This tab keeps it until it is closed."),
    h("button", { class: "primary" }, "Open"));
    main.replaceChildren(form);
    input.focus();
  }

  close() {}
  async load() {}
  hear() {}
}
