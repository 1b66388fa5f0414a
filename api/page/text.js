// Numbers, times and durations as people read them.

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat(undefined, { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const significant = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });

const NB = "\u00a0";
export const none = "–";

export const count = (value) => (value === null || value === undefined ? none : whole.format(value));
export const compact = (value) => (Math.abs(value) < 10 ? significant.format(value) : short.format(value));

export function rate(value) {
  if (value === null || value === undefined) return none;
  return value < 100 ? tenth.format(value) : whole.format(value);
}

export function percent(part, all) {
  if (!all) return none;
  const value = (100 * part) / all;
  // Almost all is not all: 49,999 of 50,000 is no 100 %.
  const shown = part < all ? Math.min(value, 99.9) : value;
  return `${part === 0 || part === all ? whole.format(shown) : tenth.format(shown)}${NB}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return none;
  if (value < 0.0995) return `${significant.format(value * 1000)}${NB}ms`;
  if (value < 99.5) return `${significant.format(value)}${NB}s`;
  return duration(value);
}

export function duration(value) {
  if (value === null || value === undefined) return none;
  const all = Math.max(0, Math.round(value));
  const [days, hours, minutes] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60];
  if (days) return `${days}${NB}d ${hours}${NB}h`;
  if (hours) return `${hours}${NB}h ${minutes}${NB}min`;
  if (minutes) return `${minutes}${NB}min ${all % 60}${NB}s`;
  return `${all}${NB}s`;
}

export const clockTime = (unix) => clock.format(unix * 1000);

export function moment(unix) {
  const date = new Date(unix * 1000);
  return date.toDateString() === new Date().toDateString() ? clock.format(date) : day.format(date);
}

export const fullMoment = (unix) => full.format(unix * 1000);

export const utc = (unix) => `${new Date(unix * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
