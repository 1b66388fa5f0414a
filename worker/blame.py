"""What ran when a run died: it is run again alone, and what ends its process alone twice is given up."""

from collections.abc import Collection, Iterable
from pathlib import Path

import orjson

MOST_DEATHS = 2


class Blame:
    """Kept in a file, which outlives the process: what runs now, and what ran when earlier ones died.

    A request whose row is `done` is not to blame.
    """

    def __init__(self, path: Path, done: Collection[int]) -> None:
        self._path = path
        self._running: set[str] = set()
        self._deaths: dict[str, int] = {}
        self.alone = False
        """Whether what runs from now on runs alone."""
        if path.exists():
            known = orjson.loads(path.read_bytes())
            self._deaths = known["deaths"]
            for id in known["running"]:
                if int(id.rpartition(":")[2]) not in done:
                    self._deaths[id] = self._deaths.get(id, 0) + known["alone"]
            self._write()

    @property
    def suspects(self) -> frozenset[str]:
        """The requests that ran when a process died."""
        return frozenset(self._deaths)

    def is_guilty(self, id: str) -> bool:
        """Tell whether a request has ended its process alone too often."""
        return self._deaths.get(id, 0) >= MOST_DEATHS

    def admit(self, ids: Iterable[str], running: Iterable[str]) -> None:
        """Note that `ids` are about to run beside those that run already."""
        self._running = {*running, *ids}
        self._write()

    def acquit(self) -> None:
        """Note that the process ends in good order: nobody is to blame for that."""
        self._running = set()
        if self._deaths:
            self._write()
        else:
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        facts = {"running": sorted(self._running), "alone": self.alone, "deaths": self._deaths}
        draft = self._path.with_suffix(".tmp")
        draft.write_bytes(orjson.dumps(facts))
        draft.replace(self._path)
