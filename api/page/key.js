// Asks for the API key. It is kept until the tab is closed.

import { key } from "./api.js";
import { h, setText } from "./dom.js";

export class AskKey {
  title = "API key";

  constructor(main, message, opened) {
    const input = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true,
      "aria-describedby": "key-help" });
    const told = h("p", { class: key.get() ? "bad" : "", role: "alert" }, message);
    const form = h("form", { class: "card key", onsubmit: (event) => {
      event.preventDefault();
      const given = input.value.trim();
      // No header could carry it: the browser would not even ask.
      if (!/^[\x21-\x7e]+$/.test(given)) {
        setText(told, "This key has characters that no key has. Was it copied whole?");
        told.className = "bad";
        return;
      }
      key.set(given);
      opened();
    } },
    h("h1", { tabindex: "-1" }, "API key"),
    told,
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
