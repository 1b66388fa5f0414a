// The stream of events, read with fetch: EventSource could not send the key in a header.

import { failure, headers } from "./api.js";

const HIDDEN_MS = 20_000;
const SILENCE_MS = 40_000;
const LONGEST_MS = 30_000;

export class Events {
  // tell(name, data) hears events; state(name, error) hears "live", "away" and "refused".
  constructor(tell, state) {
    this.tell = tell;
    this.state = state;
    this.lastId = "";
    this.pause = 1000;
    this.abort = null;
    this.run = 0;
    document.addEventListener("visibilitychange", () => this.visibility());
  }

  start() {
    this.stop();
    this.loop(++this.run);
  }

  stop() {
    this.run += 1;
    this.abort?.abort();
  }

  // A browser has few connections to one server: tabs that nobody sees give theirs back.
  visibility() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.rest(), HIDDEN_MS);
    else if (this.resting) {
      this.resting = false;
      this.start();
    }
  }

  rest() {
    this.resting = true;
    this.stop();
  }

  async loop(run) {
    while (run === this.run) {
      try {
        await this.listen(run);
      } catch (error) {
        if (run !== this.run) return;
        if (error.status === 401) {
          this.state("refused", error);
          return;
        }
        this.state("away", error);
      }
      await new Promise((done) => setTimeout(done, this.pause));
      this.pause = Math.min(this.pause * 2, LONGEST_MS);
    }
  }

  async listen(run) {
    this.abort = new AbortController();
    // A connection that died says nothing of it; an API that lives sends a comment every 15 s.
    const quiet = () => setTimeout(() => this.abort.abort(), SILENCE_MS);
    let timer = quiet();
    try {
      const more = this.lastId ? { "Last-Event-ID": this.lastId } : {};
      const response = await fetch("v1/events", { headers: headers(more), cache: "no-store", signal: this.abort.signal });
      if (!response.ok) throw await failure(response);
      this.pause = 1000;
      this.state("live");
      let rest = "";
      for await (const text of texts(response.body)) {
        if (run !== this.run) return;
        clearTimeout(timer);
        timer = quiet();
        const blocks = (rest + text).split("\n\n");
        rest = blocks.pop();
        blocks.forEach((block) => this.take(block));
      }
    } finally {
      clearTimeout(timer);
    }
  }

  take(block) {
    const fields = Object.fromEntries(block.split("\n").map((line) => {
      const colon = line.indexOf(": ");
      return [line.slice(0, colon), line.slice(colon + 2)];
    }));
    if (!fields.event) return;
    this.tell(fields.event, JSON.parse(fields.data));
    this.lastId = fields.id;
  }
}

async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}
