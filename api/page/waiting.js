// Why a job stands still. The words are the server's (jobs/standstill.py); here is only which of them are a job's.

import { h, setText } from "./dom.js";
import { ended } from "./status.js";

// `queue` is what GET /v1/queue tells; null while that is not known.
export function waits(batch, queue) {
  if (!queue || ended(batch)) return null;
  const step = queue.failing.find((one) => one.batch === batch.id);
  const model = batch.status === "in_progress" && queue.models.find((one) => one.model === batch.model);
  return (step ?? (model || queue)).waits ?? null;
}

export const said = (reason) => (reason ? `Waiting: ${reason.replace(/\.$/, "")}` : "");

export class Waiting {
  constructor() {
    this.words = h("span", {});
    this.element = h("p", { class: "waits", hidden: true }, this.words, " ", h("a", { href: "#/queue" }, "Queue and workers"));
  }

  show(reason) {
    this.element.hidden = !reason;
    setText(this.words, reason ? `${said(reason)}.` : "");
  }
}
