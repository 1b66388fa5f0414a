"""A Longhaul elsewhere, or another service with the OpenAI Batch API, for `longhaul generate --submit`."""

import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson

from jobs import client, download, errors, tokens, values
from jobs.dataset import recipe, work

_REMOTE = "remote.json"


class JobFailed(errors.LonghaulError):
    """The job {job} at {url} is {status}: {reason}. The same command sends it again."""


class JobTooLarge(errors.LonghaulError):
    """{url} refuses a job of {requests} ({bytes:,} bytes): {reason}. Give a smaller --job-rows."""


class NotServed(errors.InvalidRequest):
    """{url} serves {served}, not {model!r}. Give --model one of these."""


class Service:
    """Jobs are batches there. Each is created once, also when this process dies in between.

    The batches of a broken-off run go on; the next run takes up what they have made.
    """

    revision: str | None = None

    def __init__(
        self,
        api: client.Client,
        model: str,
        *,
        completion_window: str = "24h",
        window: int = 4,
        poll_seconds: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model, self.fingerprint, self.window = model, f"served:{model}", window
        self._api, self._completion_window = api, completion_window
        self._poll_seconds, self._sleep = poll_seconds, sleep

    def check(self) -> None:
        """Raise NotServed where the service says which models it has, and this is none of them."""
        try:
            served = self._api.models()
        except client.ServerRefused as refused:
            if refused.status == HTTPStatus.NOT_FOUND:  # another service may not tell
                return
            raise
        if self.model not in served:
            raise NotServed(url=self._api.url, model=self.model, served=", ".join(served) or "no model")

    def tokenizer(self) -> tokens.Tokenizer | None:
        """Return None: the model is elsewhere."""
        return None

    def start(self, job: work.Job) -> None:
        """Upload a job and create its batch, unless an earlier run has; raises JobTooLarge."""
        known = self._known(job)
        if "batch" in known:
            return
        try:
            known["file"] = self._file(job, known)
            self._note(job, known)
            body = {
                "endpoint": _endpoint(job.requests),
                "input_file_id": known["file"],
                "completion_window": self._completion_window,
            }
            known["batch"] = self._api.create(body, known["key"]).id
        except client.ServerRefused as refused:
            # Nothing of it was computed: its requests are asked for again, maybe in smaller jobs.
            requests, size = len(job.keys()), job.requests.stat().st_size
            job.remove()
            if refused.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                raise JobTooLarge(
                    url=self._api.url,
                    requests=values.counted(requests, "request"),
                    bytes=size,
                    reason=refused,
                ) from None
            raise
        self._note(job, known)

    def finish(self, job: work.Job, listener: work.Listener) -> None:
        """Wait for a batch and fetch its files; raises JobFailed."""
        try:
            batch = self._ended(job, listener)
            if batch.status == "failed" or (batch.output_file_id is None and batch.error_file_id is None):
                raise self._failed(batch)
            files = {"output": work.OUTPUT, "errors": work.ERRORS, "metrics": work.METRICS}
            to = {kind: job.directory / name for kind, name in files.items()}
            download.fetch(self._api, batch, to)
        except JobFailed:
            self._forget(job)
            raise
        except client.ServerRefused as refused:
            if refused.status == HTTPStatus.NOT_FOUND:  # deleted there, or expired
                self._forget(job)
            raise

    def close(self) -> None:
        """Do nothing: whoever made the client closes it."""

    def _ended(self, job: work.Job, listener: work.Listener) -> client.Batch:
        name = self._known(job)["batch"]
        while True:
            batch = self._api.batch(name)
            listener(work.progress_of(batch))
            if batch.ended:
                return batch
            self._sleep(self._poll_seconds)

    def _file(self, job: work.Job, known: dict[str, Any]) -> str:
        """Return the id of the uploaded requests. What a run that died has uploaded is found by its name."""
        if "file" in known:
            return str(known["file"])
        begun = "key" in known
        if not begun:
            known["key"] = str(uuid.uuid4())
            self._note(job, known)
        name = f"generate-{known['key']}.jsonl"
        with job.requests.open("rb") as stream:
            found = self._api.uploaded(name, job.requests.stat().st_size) if begun else None
            return found or self._api.upload(name, stream)

    def _failed(self, batch: client.Batch) -> JobFailed:
        """Return what was wrong with a batch."""
        told = batch.errors.data if batch.errors else []
        reasons = [f"line {one.line}: {one.message}" if one.line else one.message for one in told[:3]]
        reason = "\n".join(reasons) or "no reason was given"
        return JobFailed(job=batch.id, status=batch.status, url=self._api.url, reason=reason)

    def _known(self, job: work.Job) -> dict[str, Any]:
        """Return what was noted of a job, if it was sent to this service."""
        try:
            known = dict(orjson.loads((job.directory / _REMOTE).read_bytes()))
        except (FileNotFoundError, orjson.JSONDecodeError):
            known = {}
        return known if known.get("url") == self._api.url else {"url": self._api.url}

    def _note(self, job: work.Job, known: dict[str, Any]) -> None:
        place = job.directory / _REMOTE
        unfinished = place.with_suffix(".part")
        unfinished.write_bytes(orjson.dumps(known))
        unfinished.replace(place)

    def _forget(self, job: work.Job) -> None:
        """Forget the batch, so that the next run sends another."""
        (job.directory / _REMOTE).unlink(missing_ok=True)


def _endpoint(requests: Path) -> str:
    with requests.open("rb") as stream:
        return str(orjson.loads(stream.readline()).get("url", recipe.CHAT))
