"""This machine's engine for `longhaul generate`: each job is an offline run; the engine stays loaded."""

from pathlib import Path
from typing import Any, Self

from jobs import places, progress, sources, tokens
from jobs.client import Batch
from jobs.dataset import work
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker import engine, offline_job


class EngineHere:
    """A served model, loaded when the first job needs it. `model` as in `longhaul run --model`."""

    window = 1

    def __init__(self, model: str, settings: Settings, **said: Any) -> None:
        self._served = settings.models.get(model) or ModelSettings(source=model)
        if said:
            self._served = self._served.model_copy(update=said)
        self.model = model if model in settings.models else Path(model).name
        self._option = f"LONGHAUL_MODELS, {model}: " if model in settings.models else "--model "
        self.settings = settings.model_copy(update={"models": {self.model: self._served}})
        self.fingerprint = self.settings.fingerprints[self.model]
        self.revision = self._served.revision
        self._engine: engine.Engine | None = None

    def tokenizer(self) -> tokens.Tokenizer | None:
        """Return the model's tokenizer; raises SourceUnavailable or ModelUnavailable."""
        self._require()
        return tokens.cached(self.model, self._served)

    def start(self, job: work.Job) -> None:
        """Do nothing: a job runs when its end is waited for."""

    def finish(self, job: work.Job, listener: work.Listener) -> None:
        """Run what is left of a job; raises KeyboardInterrupt after what has finished was written."""
        heard = _Heard(listener)
        run = offline_job.OfflineJob(
            job.requests, job.directory / work.OUTPUT, self._served, self.model, self.settings, self._loaded
        )
        run.run(heard)
        made = places.of_job(job.directory / work.OUTPUT)
        for kind, name in (("errors", work.ERRORS), ("metrics", work.METRICS)):
            if made[kind].exists():
                made[kind].replace(job.directory / name)

    def close(self) -> None:
        """Unload the model."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _loaded(self) -> engine.Engine:
        if self._engine is None:
            self._require()
            self._engine = engine.open_engine(self.model, self._served, self.settings)
        return self._engine

    def _require(self) -> None:
        sources.require(self.settings.models, {self.model: self._option}, self.settings)


class _Heard:
    """A view of a run that tells a listener how far it is."""

    def __init__(self, listener: work.Listener) -> None:
        self._listener = listener

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, batch: Batch, pace: progress.Pace, now: float) -> None:
        self._listener(work.progress_of(batch))

    def note(self, text: str) -> None:
        """Say nothing of what a job says of itself: the line of the whole run is on the screen."""
