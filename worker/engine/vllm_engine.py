"""vLLM behind our engine's face, for those who already run it: the same groups, results and metrics.

vLLM schedules and computes; it gets token ids and gives token ids. Waiting, admission, choices, stop strings
and texts are those of our own engines.
"""

import dataclasses
import itertools
import time
from typing import Any, Protocol

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from jobs import errors, tokens
from worker.engine import loader, vllm_core, vllm_translation
from worker.engine import source as sources
from worker.engine.base import Engine
from worker.engine.rows import RowState
from worker.engine.types import Completion, EngineConfig, Request, Row

_FEW = 8


class Core(Protocol):
    """What is asked of vLLM; see vllm_core.Core."""

    vocabulary: int
    kv_bytes_budget: int

    @property
    def queued(self) -> int: ...

    @property
    def kv_bytes_in_use(self) -> int: ...

    def add(self, key: str, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> None: ...

    def abort(self, keys: list[str]) -> None: ...

    def step(self) -> list[Any]: ...

    def close(self) -> None: ...


class _State(RowState):
    """A row that vLLM runs, and how many of its prompt's tokens vLLM found computed."""

    adjustments = None  # vLLM changes the logits
    cached_tokens = 0


class VllmEngine(Engine):
    """Hands waiting requests to vLLM, as many as may run, and takes their tokens."""

    def __init__(
        self,
        core: Core,
        tokenizer: Any,
        context_tokens: int,
        eos_ids: frozenset[int],
        config: EngineConfig,
    ) -> None:
        super().__init__(tokenizer, context_tokens, core.vocabulary, config)
        self._no_embeddings = "engine vllm does not embed: embeddings need engine auto"
        self._core: Core | None = core
        self.stats.kv_bytes_budget = core.kv_bytes_budget
        self._eos_ids = eos_ids
        self._states: dict[str, _State] = {}
        """What vLLM has, by the key that it knows it by."""
        self._keys = itertools.count()

    @classmethod
    def open(cls, source: str, config: EngineConfig, name: str | None = None) -> "VllmEngine":
        """Load a source; raises errors.ModelUnavailable."""
        try:
            device = vllm_core.device()
            location, options = sources.locate(source, config)
            tokenizer = AutoTokenizer.from_pretrained(location, **options)
            model = AutoConfig.from_pretrained(location, **options)
            context = config.context_tokens or tokens.context_of(model, tokenizer)
            arguments = vllm_translation.engine_arguments(location, options, config, context, device)
            ends = loader.end_ids(_generation_config(location, options), model, tokenizer)
            return cls(vllm_core.Core(arguments), tokenizer, context, ends, config)
        except Exception as error:  # a model's own code and files may raise anything
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise errors.ModelUnavailable(name=name or source, source=source, reason=reason) from error

    def room(self) -> int:
        """Return how many more requests to claim now: a batch is to wait while the last one drains."""
        return max(0, self.config.max_running - len(self._waiting))

    def step(self) -> list[Completion]:
        assert self._core is not None
        started = time.perf_counter()
        self._abort_dropped()
        self._hand_over(self._core)
        if self._states:
            self._advance(self._core)
            self.stats.step_seconds += time.perf_counter() - started
        self.stats.kv_bytes_in_use = self._core.kv_bytes_in_use
        return self._take_ready()

    def close(self) -> None:
        if self._core is None:  # closed already
            return
        core, self._core = self._core, None
        self._forget_all()
        self._states.clear()
        core.close()

    def _refusal(self, request: Request) -> str | None:
        reason = super()._refusal(request)
        if reason is not None or request.sampling.grammar is not None:
            return reason or vllm_translation.refusal(request.sampling, frozenset())
        return vllm_translation.refusal(request.sampling, self._state(Row(request)).end_ids)

    def _state(self, row: Row) -> _State:
        return _State(row, self.tokenizer, self._eos_ids)

    def _abort_dropped(self) -> None:
        dropped = [key for key, state in self._states.items() if state.row.dropped]
        self._end(dropped)

    def _end(self, keys: list[str]) -> None:
        """Let go of rows that vLLM would go on with."""
        for key in keys:
            del self._states[key]
        if keys and self._core is not None:
            self._core.abort(keys)

    def _hand_over(self, core: Core) -> None:
        """Give vLLM as many rows as may run; none while some of them wait: leases may get lost."""
        room = self.config.max_running - len(self._states)
        if room <= 0 or core.queued:
            return
        with self._lock:
            rows = list(itertools.islice(self._waiting, room))
        for row in self._admit(rows):
            state, wanted = self._state(row), row.request.sampling
            key = str(next(self._keys))
            try:
                parameters = vllm_translation.sampling(wanted, state.end_ids)
                core.add(key, row.request.prompt_ids, parameters, row.request.root)
            except ValueError as error:  # it refuses more than we know of
                reason = f"vLLM refuses it: {error}".split("\n")[0]
                self._finish(row, self._completion(row, "error", error=reason))
            else:
                self._states[key] = state

    def _advance(self, core: Core) -> None:
        decoding = sum(state.row.first_token is not None for state in self._states.values())
        waits = bool(self._waiting)
        outputs = core.step()
        now = time.monotonic()
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is not None and not state.row.dropped:
                self._take(output, state, now)
        stats = self.stats
        stats.steps += 1
        stats.decode_steps += decoding > 0
        stats.steps_below_8 += 0 < decoding < _FEW and not waits

    def _take(self, output: Any, state: _State, now: float) -> None:
        """Take what a step brought for one row; end the row where it ends by our own rules."""
        made, row = output.outputs[0], state.row
        if row.first_token is None and made.token_ids:
            self._count_prompt(output, state)
        for index, token_id in enumerate(made.token_ids):
            if row.request.sampling.logprobs is not None:
                found = made.logprobs[index]
                state.note_logprobs(
                    vllm_translation.token_logprobs(token_id, found, row.request.sampling.logprobs)
                )
            self.stats.tokens_sampled += 1
            completion = state.take(token_id, now)
            if completion is not None:
                self._hand_back(output, state, completion)
                return
        if output.finished:
            reason = f"vLLM ended it: {made.finish_reason}"
            self._hand_back(output, state, self._completion(row, "error", error=reason))

    def _count_prompt(self, output: Any, state: _State) -> None:
        state.cached_tokens = output.num_cached_tokens or 0
        self.stats.prefix_tokens_reused += state.cached_tokens
        self.stats.prefill_tokens_computed += len(state.row.request.prompt_ids) - state.cached_tokens

    def _hand_back(self, output: Any, state: _State, completion: Completion) -> None:
        if output.finished:
            del self._states[output.request_id]
        else:
            self._end([output.request_id])
        self._finish(state.row, dataclasses.replace(completion, cached_tokens=state.cached_tokens))


def _generation_config(location: str, options: dict[str, Any]) -> GenerationConfig | None:
    """Return the generation config of a model, if it has one."""
    try:
        return GenerationConfig.from_pretrained(location, **options)
    except OSError:
        return None
