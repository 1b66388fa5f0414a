// The charts of a job's page, made of its profile.

import { Chart, histogram, overTime, said } from "./charts.js";
import { h, table } from "./dom.js";
import { clockTime, compact, count, percent, seconds } from "./text.js";

const LATENCIES = [["e2e_seconds", "End to end"], ["ttft_seconds", "Time to first token"],
  ["queue_seconds", "Waiting in the queue"], ["inter_token_seconds", "Between tokens"]];
const LENGTHS = [["prompt_tokens", "Prompt lengths, tokens"], ["completion_tokens", "Output lengths, tokens"]];
const ratio = (value) => `${Math.round(value)}\u00a0%`;
const MOST_RATIOS = 40;

export class Profile {
  constructor() {
    const made = ([name, title], draw) => [name, new Chart(title, draw)];
    this.times = new Map([["tokens", "Output tokens per second"], ["running", "Requests running at once"],
      ["cached", "Prompt tokens found in the prefix cache"]].map((one) => made(one, overTime)));
    this.spreads = new Map([...LATENCIES, ...LENGTHS].map((one) => made(one, histogram)));
    const charts = [...this.times.values(), ...this.spreads.values()];
    this.note = h("p", { class: "muted" });
    this.prefixes = h("div", {});
    this.element = h("div", {}, this.note, h("div", { class: "charts" }, charts.map((chart) => chart.element)), this.prefixes);
    charts.forEach((chart) => { chart.element.hidden = true; });
  }

  // `summary` has the exact percentiles of a job that has ended.
  show(profile, summary) {
    const part = profile.parts_read < profile.parts ? ` ${count(profile.parts_read)} of ${count(profile.parts)} parts have been read.` : "";
    this.note.textContent = summary ? part : `Of requests that have finished. Dashed lines may still rise: those that run count when they end.${part}`;
    this.element.hidden = !profile.timeline;
    if (profile.timeline) this.showTimes(profile.timeline, Boolean(summary));
    for (const [name] of LATENCIES) this.spread(name, profile.latency[name], summary?.latency?.[name], seconds);
    if (summary?.prefixes?.levels.length) this.prefixes.replaceChildren(prefixTree(summary.prefixes));
    for (const [name] of LENGTHS) this.spread(name, profile.lengths[name], null, count);
  }

  spread(name, data, exact, format) {
    const chart = this.spreads.get(name);
    chart.element.hidden = !data;
    if (!data) return;
    const marks = exact ?? { p50: data.p50, p90: data.p90, p99: data.p99 };
    const facts = ["p50", "p90", "p99"].map((mark) => `${mark} ${format(marks[mark])}`).join("   ");
    const rows = data.counts.map((number, place) => [`${format(data.edges[place])} to ${format(data.edges[place + 1])}`, count(number)]);
    chart.show({ ...data, marks, format, names: ["Range", "Requests"], rows }, facts);
  }

  showTimes(line, over) {
    const { began_at: began, bin_seconds: step } = line;
    const settled = line.running.length - (over ? 0 : Math.ceil(line.longest_seconds / step));
    const sum = (values) => values.reduce((all, value) => all + value, 0);
    const tokens = line.output_tokens.map((value) => value / step);
    const show = (name, values, wide, format, facts, most) => {
      const rows = values.map((value, place) => [clockTime(began + wide * place), said(value, format)]);
      const open = Math.max(0, most ? values.length : settled);
      this.times.get(name).element.hidden = false;
      this.times.get(name).show({ began, step: wide, values, format, most, open, names: ["From", "Value"], rows }, facts);
    };
    show("tokens", tokens, step, compact, `peak ${compact(Math.max(...tokens))}`);
    show("running", line.running, step, compact, `peak ${compact(Math.max(...line.running))}`);
    // Of few requests a ratio is noise: wider spans.
    const width = Math.ceil(tokens.length / MOST_RATIOS);
    const groups = (values) => Array.from({ length: Math.ceil(values.length / width) },
      (_, place) => sum(values.slice(place * width, (place + 1) * width)));
    const [prompts, cached] = [groups(line.prompt_tokens), groups(line.cached_tokens)];
    const hits = prompts.map((all, place) => (all ? (100 * cached[place]) / all : null));
    show("cached", hits, step * width, ratio, `${percent(sum(cached), sum(prompts))} of all`, 100);
  }
}

// What the plan could share: the first level are runs of tokens that prompts begin with, the next what follows these.
function prefixTree({ levels, tokens, shared }) {
  const columns = [{ title: "Level", kind: "number" }, ...["Common runs", "Requests that have one", "Their tokens, once", "Tokens saved"]
    .map((title) => ({ title, kind: "right number" }))];
  const rows = levels.map((one, place) => [String(place + 1), ...[one.runs, one.requests, one.tokens, one.saved].map(count)]);
  return h("section", { class: "prefixes", "aria-labelledby": "prefix-title" }, h("h2", { id: "prefix-title" }, "Shared prefixes"),
    h("p", { class: "muted" }, `${count(shared)} of ${count(tokens)} prompt tokens (${percent(shared, tokens)}) could be shared.`),
    table("Shared prefixes by level", columns, rows));
}
