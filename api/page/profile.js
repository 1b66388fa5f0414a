// The charts of a job's page, made of its profile.

import { Chart, histogram, overTime } from "./charts.js";
import { h } from "./dom.js";
import { compact, count, percent, rate, seconds, clockTime } from "./text.js";

const LATENCIES = [["e2e_seconds", "End to end"], ["ttft_seconds", "Time to first token"],
  ["queue_seconds", "Waiting in the queue"], ["inter_token_seconds", "Between tokens"]];
const LENGTHS = [["prompt_tokens", "Prompt lengths, tokens"], ["completion_tokens", "Output lengths, tokens"]];
const ratio = (value) => `${rate(value)} %`;

export class Profile {
  constructor() {
    const made = ([name, title], draw) => [name, new Chart(title, draw)];
    this.times = new Map([["tokens", "Output tokens per second"], ["running", "Requests running at once"],
      ["cached", "Prompt tokens found in the prefix cache"]].map((one) => made(one, overTime)));
    this.spreads = new Map([...LATENCIES, ...LENGTHS].map((one) => made(one, histogram)));
    const charts = [...this.times.values(), ...this.spreads.values()];
    this.note = h("p", { class: "muted" });
    this.element = h("div", {}, this.note, h("div", { class: "charts" }, charts.map((chart) => chart.element)));
    charts.forEach((chart) => { chart.element.hidden = true; });
  }

  // `summary` has the exact percentiles of a job that has ended.
  show(profile, summary) {
    const part = profile.parts_read < profile.parts ? ` ${count(profile.parts_read)} of ${count(profile.parts)} parts have been read.` : "";
    this.note.textContent = summary ? part : `Of what has finished; a request that runs counts when it ends.${part}`;
    this.element.hidden = !profile.timeline;
    if (profile.timeline) this.showTimes(profile.timeline);
    for (const [name] of LATENCIES) this.spread(name, profile.latency[name], summary?.latency?.[name], seconds);
    for (const [name] of LENGTHS) this.spread(name, profile.lengths[name], null, compact);
  }

  spread(name, data, exact, format) {
    const chart = this.spreads.get(name);
    chart.element.hidden = !data;
    if (!data) return;
    const marks = exact ?? { p50: data.p50, p90: data.p90, p99: data.p99 };
    const facts = ["p50", "p90", "p99"].map((mark) => `${mark} ${format(marks[mark])}`).join("  ");
    const rows = data.counts.map((number, place) => [`${format(data.edges[place])} to ${format(data.edges[place + 1])}`, count(number)]);
    chart.show({ ...data, marks, format, names: ["Range", "Requests"], rows }, facts);
  }

  showTimes(line) {
    const { began_at: began, bin_seconds: step } = line;
    const over = (name, values, format, facts, most) => {
      const rows = values.map((value, place) => [clockTime(began + step * place), format(value)]);
      this.times.get(name).element.hidden = false;
      this.times.get(name).show({ began, step, values, format, most, names: ["From", "Value"], rows }, facts);
    };
    const sum = (name) => line[name].reduce((all, value) => all + value, 0);
    const tokens = line.output_tokens.map((value) => value / step);
    over("tokens", tokens, compact, `peak ${compact(Math.max(...tokens))}`);
    over("running", line.running, compact, `peak ${compact(Math.max(...line.running))}`);
    const hits = line.cached_tokens.map((value, place) => (line.prompt_tokens[place] ? (100 * value) / line.prompt_tokens[place] : 0));
    over("cached", hits, ratio, `${percent(sum("cached_tokens"), sum("prompt_tokens"))} of all`, 100);
  }
}
