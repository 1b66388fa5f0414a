"""How long drafts are to be: as long as each token is expected to bring more than its share of a step."""

from collections import OrderedDict
from weakref import WeakKeyDictionary

from worker.engine.sequence import Sequence

_FIRST = 0.6
_OF_SEQUENCE, _OF_JOB = 0.2, 0.02
_DRIFT = 0.005
_JOBS = 64
# A step takes as long as so many tokens, and 1 more for each: measured on a CPU; on a GPU by the ratio of
# its compute to its bandwidth.
_FIXED_TOKENS = {"cpu": 24.0, "cuda": 128.0}


def fixed_tokens(device: str) -> float:
    """Return how many more tokens double the time of a step for few, on a kind of device."""
    return _FIXED_TOKENS.get(device, _FIXED_TOKENS["cpu"])


class Chances:
    """How likely the next drafted token of a sequence is right, if those before it were: learned from what
    became of earlier ones. A sequence begins with what its job has learned.
    """

    def __init__(self) -> None:
        self._sequences: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        self._jobs: OrderedDict[str, float] = OrderedDict()

    def of(self, sequence: Sequence) -> float:
        return self._sequences.setdefault(sequence, self._jobs.get(sequence.row.request.job, _FIRST))

    def learn(self, sequence: Sequence, right: bool) -> None:
        """Learn whether a token was right, of whose draft all before it were."""
        job = sequence.row.request.job
        of_sequence, of_job = self.of(sequence), self._jobs.get(job, _FIRST)
        self._sequences[sequence] = of_sequence + _OF_SEQUENCE * (right - of_sequence)
        self._jobs[job] = of_job + _OF_JOB * (right - of_job)
        self._jobs.move_to_end(job)
        if len(self._jobs) > _JOBS:
            self._jobs.popitem(last=False)

    def forgive(self, sequence: Sequence) -> None:
        """Let the chance of a sequence without a draft drift back, so that one is tried again some time."""
        of_sequence = self.of(sequence)
        self._sequences[sequence] = of_sequence + _DRIFT * max(0.0, _FIRST - of_sequence)


def lengths(chances: list[float], most: list[int], fixed: float, cost: float) -> list[int]:
    """Return how many tokens to draft for each sequence, at most `most`, for the most tokens a second.

    A step takes `fixed` and 1 for each token; a drafted one takes `cost` more. Where the chance is c, the
    j-th token of a draft counts with probability c ** j.
    """
    found = [0] * len(chances)
    tokens, time = float(len(chances)), fixed + len(chances)
    gains = [(c ** (j + 1), -i) for i, c in enumerate(chances) for j in range(most[i])]
    for gain, minus_i in sorted(gains, reverse=True):
        if gain * time <= tokens * (1 + cost):
            break
        found[-minus_i] += 1
        tokens, time = tokens + gain, time + 1 + cost
    return found
