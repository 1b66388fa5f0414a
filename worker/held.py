"""The leases a worker holds, shared by the threads that claim, renew and complete them."""

from collections.abc import Callable, Iterable
from threading import Lock

from jobs.ledger import Lease


class Held:
    """request id -> lease, from claim to completion; `on_drop` hears of all that go, whatever the reason."""

    def __init__(self, on_drop: Callable[[list[Lease]], None] = lambda leases: None) -> None:
        self._on_drop = on_drop
        self._leases: dict[str, Lease] = {}
        self._finished: set[str] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def unwritten(self) -> bool:
        """Whether finished requests wait to be written."""
        return bool(self._finished)

    def add(self, leases: Iterable[Lease]) -> None:
        replaced = []
        with self._lock:
            for lease in leases:
                if (old := self._leases.get(lease.request.id)) is not None:
                    replaced.append(old)
                self._leases[lease.request.id] = lease
                self._finished.discard(lease.request.id)
        if replaced:
            self._on_drop(replaced)

    def finish(self, lease: Lease) -> None:
        """Note that a request has its result: until that is written its lease is kept."""
        with self._lock:
            if self._leases.get(lease.request.id) is lease:
                self._finished.add(lease.request.id)

    def unfinished(self) -> list[Lease]:
        """Return the leases of requests that wait or run."""
        with self._lock:
            return [lease for id, lease in self._leases.items() if id not in self._finished]

    def get(self, ids: Iterable[str]) -> list[Lease]:
        """Return the leases of those ids that are still held."""
        with self._lock:
            return [self._leases[id] for id in ids if id in self._leases]

    def all(self) -> list[Lease]:
        with self._lock:
            return list(self._leases.values())

    def drop(self, leases: Iterable[Lease]) -> None:
        """Forget leases; one that was claimed anew under the same id stays."""
        gone = []
        with self._lock:
            for lease in leases:
                if self._leases.get(lease.request.id) is lease:
                    del self._leases[lease.request.id]
                    self._finished.discard(lease.request.id)
                    gone.append(lease)
        if gone:
            self._on_drop(gone)
