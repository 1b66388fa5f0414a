"""One run, as the command or the Python function asks for it: opened, checked, and ready to be made."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from jobs import client, errors
from jobs.dataset import making, remote, report, steps, work
from jobs.dataset.input import source
from jobs.settings import Settings

ENGINES = "longhaul.engines"
_PATIENCE_SECONDS = 600.0
"""A service may restart while a run waits for it."""


class EngineMissing(errors.LonghaulError):
    """To compute here needs the module {module!r}: pip install 'longhaul[worker]'. Or give --submit URL."""


@dataclass(frozen=True)
class Asked:
    """What a run is to do. `place`: as `source.open_source` takes it; `settings`, `model_settings`: of the
    engine here.
    """

    place: source.Place
    output: Path
    model: str
    pipeline: steps.Pipeline
    columns: Sequence[str] | None = None
    where: str | None = None
    limit: int | None = None
    options: making.Options = field(default_factory=making.Options)
    submit: str | None = None
    api_key: str | None = field(default=None, repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    model_settings: dict[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()


@contextlib.contextmanager
def opened(asked: Asked, view: report.View) -> Iterator[making.Making]:
    """Open the input and what computes, check the steps, and hold the output's directory.

    Raises what is wrong before anything is computed.
    """
    working = making.working_directory(asked.output)
    scratch = working / "scratch"
    rows = source.open_source(
        asked.place, where=asked.where, limit=asked.limit, scratch=scratch, outputs=[asked.output, working]
    )
    with _backend(asked, view) as backend:
        made = making.Making(
            rows,
            asked.pipeline,
            backend,
            asked.output,
            view,
            asked.options,
            columns=asked.columns,
            scratch=scratch,
        )
        with made.alone():
            yield made


@contextlib.contextmanager
def _backend(asked: Asked, view: report.View) -> Iterator[work.Backend]:
    if asked.submit is None:
        with contextlib.closing(_engine_here(asked)) as engine:
            yield engine
        return

    def tell(reason: str) -> None:
        view.say(f"{asked.submit}: {reason}; trying again, for ten minutes in all.")

    with client.Client(asked.submit, asked.api_key, patience_seconds=_PATIENCE_SECONDS, on_retry=tell) as api:
        service = remote.Service(api, asked.model)
        service.check()
        yield service


def _engine_here(asked: Asked) -> work.Backend:
    (point,) = metadata.entry_points(group=ENGINES, name="here")
    try:
        opener = point.load()
    except ModuleNotFoundError as error:
        raise EngineMissing(module=error.name) from None
    backend: work.Backend = opener(asked.model, Settings.load(**asked.settings), **asked.model_settings)
    return backend
