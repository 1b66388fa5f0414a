"""What a worker counts of models that come and go."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from worker.models import Models


@dataclass
class Counted:
    steps: int = 7


@dataclass
class Served:
    """A model that is loaded, with nothing to do."""

    name: str = "a"
    engine: Any = field(default_factory=lambda: SimpleNamespace(stats=Counted(), close=lambda: None))

    def drain(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("after", [None, "b"])
def test_what_a_model_counted_counts_once_when_its_turn_or_the_worker_ends(
    after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = object.__new__(Models)
    models._past, models.serving, models.stop_at = {}, None, 0.0
    models._settings = SimpleNamespace(drain_seconds=1)  # type: ignore[assignment]
    models._guarded, models._held = (lambda call: call()), []  # type: ignore[assignment]
    models.turns = SimpleNamespace(emptied=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(models, "_open", lambda name: Served())
    monkeypatch.setattr(models, "_serve", lambda serving: after)
    assert models._turn_of("a") == after
    found = models.stats() if after is None else models._past["a"]
    assert found == {"steps": 7}
