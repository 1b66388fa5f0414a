// What an address shows that leads nowhere.

import { h } from "./dom.js";

export class NoView {
  title = "Not found";

  constructor(main, message = "There is no such view.") {
    main.replaceChildren(h("h1", { tabindex: "-1" }, "Not found"), h("p", { class: "empty" }, message, " ", h("a", { href: "#/" }, "All jobs")));
  }

  close() {}
  async load() {}
  hear() {}
}
