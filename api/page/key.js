// Asks for the API key. It is kept until the tab is closed.

import { call, key } from "./api.js";
import { h, setText } from "./dom.js";

export class AskKey {
  title = "API key";

  // `error` is why it is asked for; `had`: whether this tab had a key until now.
  constructor(main, error, had, opened) {
    this.opened = opened;
    this.input = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true,
      "aria-describedby": "key-told key-help", oninput: () => this.input.removeAttribute("aria-invalid") });
    this.told = h("p", { id: "key-told", class: "bad", role: "alert" }, had ? "The key of this tab is not known any more." : "");
    const why = error.code === "no_api_key_yet" ? error.message : "This server answers whoever has a key.";
    main.replaceChildren(h("form", { class: "card key", onsubmit: (event) => this.submit(event) },
      h("h1", { tabindex: "-1" }, "API key"), h("p", {}, why),
      h("label", { for: "key" }, "Key"), this.input, this.told,
      h("p", { class: "muted", id: "key-help" }, "An administrator makes one: ", h("code", {}, "longhaul keys create TENANT"),
        ". This tab keeps it until it is closed."),
      h("button", { class: "primary" }, "Open")));
    this.input.focus();
  }

  async submit(event) {
    event.preventDefault();
    const given = this.input.value.trim();
    // What is said twice is told twice only if it was gone in between.
    setText(this.told, "");
    // No header could carry it: the browser would not even ask.
    if (!/^[\x21-\x7e]+$/.test(given)) this.refuse("This key has characters that no key has. Was it copied whole?");
    else if (await this.works(given)) this.opened();
  }

  async works(given) {
    key.set(given);
    try {
      await call("models");
    } catch (error) {
      // Too many calls a minute: whose they are is known.
      if (error.status === 429) return true;
      key.forget();
      if (error.status === 401) this.refuse(error.code === "no_api_key_yet" ? error.message : "That key is not known. Was it copied whole?");
      else this.tell(`${error.problem} Try again.`);
      return false;
    }
    return true;
  }

  refuse(words) {
    this.tell(words);
    this.input.setAttribute("aria-invalid", "true");
  }

  tell(words) {
    setText(this.told, words);
    this.input.focus();
    this.input.select();
  }

  close() {}
  async load() {}
  hear() {}
}
