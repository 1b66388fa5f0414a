// Downloads of what a job has made.

import { download, urlOption } from "./api.js";
import { h, setText } from "./dom.js";
import { ended } from "./status.js";
import { compact } from "./text.js";

const KINDS = [["output", "Output"], ["errors", "Errors"], ["metrics", "Metrics"], ["summary", "Summary"]];

export class Files {
  constructor() {
    this.told = h("p", { class: "muted", role: "status" });
    this.buttons = new Map(KINDS.map(([kind, title]) => [kind, h("button", { onclick: () => this.get(kind) }, `${title}`)]));
    this.hint = h("p", { class: "muted" });
    this.element = h("section", { class: "files", "aria-labelledby": "files-title", hidden: true },
      h("h2", { id: "files-title" }, "Download"), h("div", { class: "buttons" }, [...this.buttons.values()]), this.told, this.hint);
  }

  show(batch) {
    this.batch = batch;
    const ran = batch.output_file_id || batch.error_file_id;
    this.element.hidden = !ended(batch) || !ran;
    this.buttons.get("output").hidden = !batch.output_file_id;
    this.buttons.get("errors").hidden = !batch.error_file_id;
    this.buttons.get("metrics").hidden = !batch.output_file_id;
    this.hint.replaceChildren("All of them into a directory: ", h("code", {}, `longhaul results ${batch.id} -o results/${urlOption()}`));
  }

  async get(kind) {
    const button = this.buttons.get(kind);
    const file = `file-${this.batch.id.replace("batch_", "")}_${kind}`;
    const name = `${this.batch.id}_${kind}.${kind === "summary" ? "json" : "jsonl"}`;
    button.disabled = true;
    try {
      await download(file, name, (loaded, total) => setText(this.told, `${name}: ${size(loaded)} of ${size(total)}`));
      setText(this.told, `${name} is downloaded.`);
    } catch (error) {
      setText(this.told, error.status ? error.message : "The download broke off. Try again.");
    }
    button.disabled = false;
  }
}

const size = (bytes) => (bytes < 1e6 ? `${compact(bytes / 1e3)} kB` : `${compact(bytes / 1e6)} MB`);
