// How long a job still takes: the rule of jobs/eta.py, held to it by tests/unit/eta_cases.json.
// A look is [seconds, requests that succeeded, requests that failed].

const WINDOW = 60, WINDOW_SHARE = 0.25, LEAST_SECONDS = 4, LEAST_SHARE = 0.05, LEAST = 4, ENOUGH = 50;
const SHARE_AT_ONCE = 0.1, MOST_LOOKS = 200;

export function secondsLeft(looks, total) {
  if (!looks.length) return null;
  const [now, completed, failed] = looks.at(-1);
  const moves = recent(looks.filter((look, place) => place && look[1] > looks[place - 1][1]), now);
  if (moves.length < 2) return null;
  const [first, last] = [moves[0], moves.at(-1)];
  const [gained, took] = [last[1] - first[1], last[0] - first[0]];
  if (took < LEAST_SECONDS || gained < Math.min(ENOUGH, Math.max(LEAST, LEAST_SHARE * (total - failed)))) return null;
  const pause = Math.max(...moves.slice(1).map((look, place) => look[0] - moves[place][0]));
  const quiet = now - last[0];
  const rate = gained / (took + Math.max(0, quiet - pause));
  return Math.max(1, (total - completed - failed) / rate - Math.min(quiet, pause));
}

export function sinceStart([seconds, completed, failed], total) {
  if (completed < Math.max(LEAST, SHARE_AT_ONCE * (total - failed))) return null;
  return ((total - completed - failed) * seconds) / completed;
}

export function noted(looks, look) {
  const kept = [...looks];
  const [before, last] = kept.slice(-2);
  if (kept.length > 1 && before[1] === last[1] && before[2] === last[2]) kept.pop();
  const half = MOST_LOOKS / 2;
  return [...kept.filter((_, place) => kept.length < MOST_LOOKS || place >= half || place % 2 === 0), look];
}

function recent(moves, now) {
  let first = moves.length - 1;
  const all = moves.at(-1)?.[1];
  while (first > 0 && (now - moves[first - 1][0] <= WINDOW || all - moves[first][1] < WINDOW_SHARE * all)) first -= 1;
  return moves.slice(Math.max(0, first));
}
