"""A request with several choices: one row each, over one prompt, and one completion in the end."""

import dataclasses

from worker.engine import seeds
from worker.engine.types import Completion, Request, Row


class Family:
    """The rows of a request. Greedy choices are equal: one row makes them all."""

    def __init__(self, request: Request) -> None:
        self.request = request
        wanted = request.sampling
        self.rows = [Row(_choice(request, index), self) for index in range(1 if wanted.greedy else wanted.n)]
        self._done: dict[str, Completion] = {}

    def take(self, completion: Completion) -> Completion | None:
        """Take the completion of a row; return that of the request once all are there, or one has failed."""
        if completion.error is not None:
            return dataclasses.replace(completion, id=self.request.id)
        self._done[completion.id] = completion
        if len(self._done) < len(self.rows):
            return None
        choices = [self._done[row.id] for row in self.rows]
        first, others = choices[0], tuple(choices[1:])
        if len(self.rows) < self.request.sampling.n:
            others = (first,) * (self.request.sampling.n - 1)
        padding = [choice.padding_tokens for choice in choices if choice.padding_tokens is not None]
        return dataclasses.replace(
            first,
            id=self.request.id,
            others=others,
            # The first to be admitted computes the prompt, the others find it.
            cached_tokens=min(choice.cached_tokens or 0 for choice in choices),
            draft_tokens=sum(choice.draft_tokens for choice in choices),
            draft_tokens_accepted=sum(choice.draft_tokens_accepted for choice in choices),
            padding_tokens=sum(padding) if padding else None,
        )


def _choice(request: Request, index: int) -> Request:
    """Return the request of one choice."""
    wanted = request.sampling
    own = dataclasses.replace(
        wanted,
        n=1,
        seed=seeds.seed_of_choice(wanted.seed, index),
        prompt_logprobs=wanted.prompt_logprobs and index == 0,
    )
    return dataclasses.replace(request, id=f"{request.id}#{index}", sampling=own)


def rows_of(request: Request) -> list[Row]:
    """Return the rows that run for a request."""
    return [Row(request)] if request.sampling.n == 1 else Family(request).rows
