"""Between the words of a job and those of an engine: planned requests in, result rows out."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jobs import answers, errors, ids, results
from jobs.records import PlannedRequest, ResultRow
from worker import reading, token_text
from worker.engine import Completion, EmbeddingRequest, Request, Sampling


def engine_request(request: PlannedRequest) -> Request | EmbeddingRequest:
    """Return a planned request as the engine takes it."""
    if request.endpoint == answers.EMBEDDINGS:
        return EmbeddingRequest(request.id, (request.prompt_ids, *request.params.get("inputs", ())))
    params = {name: value for name, value in request.params.items() if name != "answer"}
    params["stop"] = tuple(params["stop"])
    if "logit_bias" in params:
        params["logit_bias"] = tuple((id, bias) for id, bias in params["logit_bias"])
    if params.get("seed") is None:
        params["seed"] = ids.seed(request.id)
    return Request(
        request.id, request.prompt_ids, Sampling(**params), root=request.tenant, job=request.job_id
    )


class Translator:
    """Turns what an engine made of requests into result rows. Used by the engine's thread alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def rows_of(
        self, request: PlannedRequest, completion: Completion, fingerprint: str, attempts: int, worker: str
    ) -> list[ResultRow]:
        """Return the result rows of a request that ended."""
        if completion.error is not None:
            return results.given_up(request, "engine_error", completion.error)
        try:
            outcome = self._outcome(request, completion)
            return results.rows_of(request, outcome, fingerprint, attempts, worker)
        except errors.UnusableOutput as error:
            return results.given_up(request, "engine_error", str(error))

    def _outcome(self, request: PlannedRequest, completion: Completion) -> answers.Outcome:
        unix = time.time() - time.monotonic()
        started = min(choice.timings.admitted for choice in completion.choices)
        firsts = [c.timings.first_token for c in completion.choices if c.timings.first_token is not None]
        choices = () if completion.embeddings is not None else completion.choices
        return answers.Outcome(
            choices=tuple(self._choice(request, choice, completion) for choice in choices),
            cached_tokens=completion.cached_tokens,
            started_at=unix + started,
            finished_at=unix + max(choice.timings.finished for choice in completion.choices),
            ttft_seconds=min(firsts) - started if firsts else None,
            inter_token_seconds=_between_tokens(completion.choices),
            embeddings=completion.embeddings,
            draft_tokens=completion.draft_tokens,
            draft_tokens_accepted=completion.draft_tokens_accepted,
            padding_tokens=completion.padding_tokens,
        )

    def _choice(self, request: PlannedRequest, choice: Completion, whole: Completion) -> answers.Choice:
        if not self._must_read(request):
            return answers.Choice(choice.text, choice.finish_reason, len(choice.token_ids))
        return reading.choice(self._texts, request, choice, whole.prompt_logprobs)

    @cached_property
    def _texts(self) -> token_text.TokenText:
        return token_text.TokenText(self._tokenizer)

    def _must_read(self, request: PlannedRequest) -> bool:
        """Tell whether an answer needs more than the engine's text."""
        if not request.params.keys().isdisjoint(("logprobs", "answer")):
            return True
        return request.endpoint == answers.COMPLETIONS and self._texts.strips


def _between_tokens(choices: Sequence[Completion]) -> float | None:
    """Return the mean gap between tokens of one choice; None: no choice has two."""
    spans = [
        (choice.timings.finished - choice.timings.first_token, len(choice.token_ids) - 1)
        for choice in choices
        if choice.timings.first_token is not None
    ]
    gaps = sum(count for _, count in spans if count > 0)
    return sum(seconds for seconds, count in spans if count > 0) / gaps if gaps else None
