"""vLLM in this process: the only module that imports it. Tested with 0.32."""

import gc
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Its engine runs in the thread that calls it: a process of its own would outlive a killed worker, and set
# signal handlers. It leaves logging to us, sends nobody anything, and binds no thread to a core.
_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Unavailable(Exception):
    """vLLM cannot be imported; the message is one line that says what to install."""


def device() -> str:
    """Import vLLM and return the kind of device it is built for: cuda, cpu, ...; raises Unavailable."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        reason = f"engine vllm needs vLLM: pip install 'longhaul[vllm]' ({error})"
        raise Unavailable(reason.split("\n")[0]) from error
    return str(current_platform.device_type)


@contextmanager
def _random_kept() -> Iterator[None]:
    """Undo what vLLM does to `random`: workers that draw the same numbers all retry at the same time."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


class Core:
    """One vLLM engine. A step computes at most one token for each request."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self._parameters, self._prompt = SamplingParams, tokens_input
        self._delta = RequestOutputKind.DELTA
        with _random_kept():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        tensors = self._scheduler.kv_cache_config.kv_cache_tensors
        self.kv_bytes_budget = sum(tensor.size for tensor in tensors)
        self.vocabulary = int(self._engine.model_config.get_vocab_size())

    @property
    def queued(self) -> int:
        """How many requests it holds that wait, for memory most likely."""
        return int(self._scheduler.get_request_counts()[1])

    @property
    def kv_bytes_in_use(self) -> int:
        """Bytes of keys and values that running requests use."""
        return round(self._scheduler.get_kv_cache_usage() * self.kv_bytes_budget)

    def add(self, key: str, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> None:
        """Queue a request; prefixes are shared among those of one salt. Raises ValueError."""
        parameters = self._parameters(**sampling, output_kind=self._delta)
        self._engine.add_request(key, self._prompt(prompt_ids, cache_salt=salt or None), parameters)

    def abort(self, keys: Iterable[str]) -> None:
        """Drop requests: no later step returns anything of them."""
        self._engine.abort_request(list(keys))

    def step(self) -> list[Any]:
        """Compute, and return vLLM's RequestOutputs with what is new."""
        return list(self._engine.step())

    def close(self) -> None:
        """Free the model, and what another one in this process would find taken."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine, self._scheduler
        cleanup_dist_env_and_memory()
        gc.collect()
