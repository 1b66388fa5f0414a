// The charts of a job's page, made of its profile.

import { Chart, histogram, overTime, said } from "./charts.js";
import { Table, h, setText, table } from "./dom.js";
import { clockTime, compact, count, percent, plural, seconds } from "./text.js";

const LATENCIES = [["e2e_seconds", "End to end"], ["ttft_seconds", "Time to first token"],
  ["queue_seconds", "Waiting in the queue"], ["inter_token_seconds", "Between tokens"]];
const LENGTHS = [["prompt_tokens", "Prompt lengths, tokens"], ["completion_tokens", "Output lengths, tokens"]];
const WHY = "The plan looks at one bucket at a time. The engine also shares between buckets, and cannot share what it had to forget.";
const ratio = (value) => `${Math.round(value)}\u00a0%`;
const MOST_RATIOS = 40;
// Of fewer requests that ran a chart is mostly empty: their numbers are told instead.
const LEAST_DRAWN = 5;

export class Profile {
  constructor() {
    const made = ([name, title], draw) => [name, new Chart(title, draw)];
    this.times = new Map([["output", "Output tokens per second"], ["read", "Prompt tokens read per second"], ["running", "Requests running at once"],
      ["cached", "Prompt tokens found in the prefix cache"]].map((one) => made(one, overTime)));
    this.spreads = new Map([...LATENCIES, ...LENGTHS].map((one) => made(one, histogram)));
    const charts = [...this.times.values(), ...this.spreads.values()];
    this.note = h("p", { class: "muted" });
    this.missing = h("div", { class: "missing muted" });
    this.prefixes = h("div", {});
    const percentiles = ["p50", "p90", "p99"].map((title) => ({ title, kind: "right number" }));
    this.numbers = new Table("Percentiles of latencies and lengths", [{ title: "Of a request" }, ...percentiles], false);
    this.rates = h("p", { class: "muted" });
    this.few = h("section", { class: "few", hidden: true, "aria-labelledby": "few-title" }, h("h2", { id: "few-title" }, "Latencies and lengths"),
      this.numbers.element, this.rates);
    this.charts = h("div", { class: "charts" }, charts.map((chart) => chart.element));
    this.element = h("div", {}, this.note, this.few, this.charts, this.missing, this.prefixes);
    charts.forEach((chart) => { chart.element.hidden = true; });
  }

  // `summary` is there when the job has ended; `unrun` requests of it never ran.
  show(profile, summary, unrun) {
    const part = profile.parts_read < profile.parts ? ` ${count(profile.parts_read)} of ${count(profile.parts)} parts have been read.` : "";
    const open = "Of requests that have finished. Dashed lines may still rise: those that run count when they end.";
    const whole = profile.timeline ? "" : "No request ran, so there is nothing to draw.";
    this.note.textContent = (summary ? whole : open) + part;
    this.element.hidden = !profile.timeline && !summary;
    if (profile.timeline) this.showTimes(profile.timeline, Boolean(summary));
    for (const [name] of LATENCIES) this.spread(name, profile.latency[name], seconds, false);
    for (const [name] of LENGTHS) this.spread(name, profile.lengths[name], count, true);
    this.showFew(profile);
    this.missing.replaceChildren(...[...LATENCIES, ...LENGTHS].filter(([name]) => profile.missing[name])
      .map(([name, title]) => h("p", {}, `${title}: not shown, as ${profile.missing[name]}`)));
    if (summary?.prefixes?.levels.length) this.prefixes.replaceChildren(prefixTree(summary.prefixes, profile, unrun));
  }

  showFew(profile) {
    const few = profile.computed < LEAST_DRAWN;
    this.charts.hidden = few;
    this.few.hidden = !few || !profile.timeline;
    if (!few) return;
    const row = ([name, title], data, format) => data && [title, format(data.p50), format(data.p90), format(data.p99)];
    this.numbers.show([...LATENCIES.map((one) => row(one, profile.latency[one[0]], seconds)),
      ...LENGTHS.map((one) => row(one, profile.lengths[one[0]], count))].filter(Boolean));
    const told = [...this.times.values()].filter((chart) => !chart.element.hidden).map(({ title, facts }) => `${title}: ${facts.textContent}.`);
    setText(this.rates, told.join(" "));
  }

  spread(name, data, format, whole) {
    const chart = this.spreads.get(name);
    chart.element.hidden = !data;
    if (!data) return;
    const { edges, beyond, p50, p90, p99 } = data;
    const marks = { p50, p90, p99 };
    const more = beyond ? `   ${count(beyond)} more than ${format(edges.at(-1) - 1)}` : "";
    const facts = Object.entries(marks).map(([mark, value]) => `${mark} ${format(value)}`).join("   ") + more;
    const rows = data.counts.map((number, place) => [span(data, place, format, whole), count(number)]);
    if (beyond) rows.push([`${format(edges.at(-1))} or more`, count(beyond)]);
    chart.show({ edges, counts: data.counts, marks, format, whole, names: ["Range", "Requests"], rows }, facts);
  }

  showTimes(line, over) {
    const { began_at: began, bin_seconds: step } = line;
    const settled = line.running.length - (over ? 0 : Math.ceil(line.longest_seconds / step));
    const sum = (values) => values.reduce((all, value) => all + value, 0);
    const each = `means over ${seconds(step)}`;
    const perSecond = (values) => values.map((value) => value / step);
    const show = (name, values, wide, format, facts, most) => {
      const rows = values.map((value, place) => [clockTime(began + wide * place), said(value, format)]);
      const open = Math.max(0, most ? values.length : settled);
      this.times.get(name).element.hidden = false;
      this.times.get(name).show({ began, step: wide, values, format, most, open, names: ["From", "Value"], rows }, facts);
    };
    const peak = (values) => `peak ${compact(Math.max(...values))}`;
    for (const [name, values] of [["output", perSecond(line.output_tokens)], ["read", perSecond(line.read_tokens)]]) {
      if (values.some((value) => value > 0)) show(name, values, step, compact, `${peak(values)}, ${each}`);
    }
    show("running", line.running, step, compact, `${peak(line.running)}, on average ${compact(line.mean_running)}`);
    // Of few requests a ratio is noise: wider spans.
    const width = Math.ceil(line.running.length / MOST_RATIOS);
    const groups = (values) => Array.from({ length: Math.ceil(values.length / width) },
      (_, place) => sum(values.slice(place * width, (place + 1) * width)));
    const [read, cached] = [groups(line.read_tokens), groups(line.cached_tokens)];
    const hits = read.map((rest, place) => (rest + cached[place] ? (100 * cached[place]) / (rest + cached[place]) : null));
    show("cached", hits, step * width, ratio, `${percent(sum(cached), sum(read) + sum(cached))} of all`, 100);
  }
}

// What a bar counts; whole numbers by their first and last, and the first bar of times has all that is less.
function span({ edges, least }, place, format, whole) {
  const [low, high] = [edges[place], edges[place + 1]];
  if (whole) return high - low === 1 ? format(low) : `${format(low)} to ${format(high - 1)}`;
  return least < low ? `up to ${format(high)}` : `${format(low)} to ${format(high)}`;
}

// What the plan could share: the first level are runs of tokens that prompts begin with, the next what follows these.
// It is told as the report tells it (jobs/report/sharing.py and charts.py).
function prefixTree({ levels, tokens, shared }, { computed_prompt_tokens: read, cached_tokens: cached }, unrun) {
  const columns = [{ title: "Level", kind: "number" }, ...["Common runs", "Requests that have one", "Their tokens, once", "Tokens saved"]
    .map((title) => ({ title, kind: "right number" }))];
  const of = (part, all, what = "") => `${count(part)} of ${count(all)}${what} (${percent(part, all)})`;
  const rows = levels.map((one, place) => [String(place + 1), ...[one.runs, one.requests, one.tokens, one.saved].map(count)]);
  return h("section", { class: "prefixes", "aria-labelledby": "prefix-title" }, h("h2", { id: "prefix-title" }, "Shared prefixes"),
    h("p", {}, `The plan could share ${of(shared, tokens, " prompt tokens")}; the engine shared ${of(cached, read)}.`),
    h("p", { class: "muted" }, unrun ? `The plan is of the whole file, of which ${plural(unrun, "request")} never ran. ` : "", WHY),
    table("Shared prefixes by level", columns, rows));
}
