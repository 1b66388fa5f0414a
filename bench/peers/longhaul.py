"""Our own engine, opened as a worker opens it. LONGHAUL_ variables of the environment set it up."""

from collections.abc import Callable
from typing import Any

from bench.peers import child
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker.engine import Completion, Engine, Request, Sampling, open_engine

_FEW = 8
_KV_GIB = 4


def load(config: dict[str, Any]) -> Callable[[child.Workload], child.Ran]:
    """Open the engine a worker would open for this model, in fp32; the peers have as much memory for KV.

    `settings` of the model, such as `quantize`, may come with it.
    """
    model = ModelSettings(source=config["model"], dtype="float32", **config.get("settings", {}))
    kv_bytes = config.get("kv_gib", _KV_GIB) << 30
    settings = Settings.load(models={"bench": model}, kv_memory_bytes=kv_bytes)
    return Runs(open_engine("bench", model, settings))


class Runs:
    """Runs workloads on one engine and takes what it counted meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = self._few = 0
        self._step = engine.step
        engine.step = self._watched_step  # type: ignore[method-assign]

    def __call__(self, workload: child.Workload) -> child.Ran:
        self._steps = self._few = 0
        before = self._engine.stats.to_dict()
        done = {completion.id: completion for completion in self._engine.generate(_requests(workload))}
        after = self._engine.stats.to_dict()
        failed = [completion.error for completion in done.values() if completion.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
        outputs = [done[str(index)].token_ids for index in range(len(workload))]
        stats: dict[str, float] = {name: after[name] - before[name] for name in after}
        stats |= {"watched_steps": self._steps, "watched_steps_below_8": self._few}
        return child.Ran(outputs, int(stats["prefill_tokens_computed"]), stats)

    def _watched_step(self) -> list[Completion]:
        """Step, and count the decode steps in which fewer than 8 requests ran."""
        before = self._engine.stats.decode_steps
        finished = self._step()
        steps = self._engine.stats.decode_steps - before
        self._steps += steps
        if len(self._engine.running) + len(finished) < _FEW:
            self._few += steps
        return finished


def _requests(workload: child.Workload) -> list[Request]:
    return [
        Request(str(index), prompt, Sampling(max_tokens=output, temperature=0, ignore_eos=True))
        for index, (prompt, output) in enumerate(workload)
    ]


if __name__ == "__main__":
    child.serve(load)
