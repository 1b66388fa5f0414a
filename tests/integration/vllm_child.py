"""Our vLLM engine, or the command line, in a Python that has vLLM: rounds of requests in, results out."""

import json
import logging
import random
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Serve what stdin asks for; the last line of stdout is the answer."""
    if sys.argv[1:]:
        _run_command()
    asked = json.load(sys.stdin)
    answer: dict[str, Any] = {}
    # In a thread, as a worker does it: Python lets no other thread than the main one change signal handlers.
    thread = threading.Thread(target=lambda: answer.update(_serve(asked)), name="engine")
    thread.start()
    thread.join()
    print("\n" + json.dumps(answer))


def _run_command() -> None:
    from jobs import cli
    from worker import offline

    cli.Commands("longhaul", commands={"run": offline.run})(prog_name="longhaul")


def _serve(asked: dict[str, Any]) -> dict[str, Any]:
    from jobs.model_settings import ModelSettings
    from jobs.settings import Settings
    from worker import engine as engines

    model = ModelSettings(source=asked["model"], engine="vllm", context_tokens=2048)
    settings = Settings(models={"m": model}, max_running=16, kv_memory_bytes=1 << 29)
    before = _process()
    engine = engines.open_engine("m", model, settings)
    rounds = [_round(engine, **one) for one in asked["rounds"]]
    unchanged = before == _process()
    stats, held = engine.stats.to_dict(), sorted(engine.running | engine.waiting)
    engine.close()
    return {"rounds": rounds, "unchanged": unchanged, "stats": stats, "held": held}


def _process() -> list[Any]:
    """Return what is the whole process's and not the engine's to change."""
    root = logging.getLogger()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)]
    return [*handlers, list(root.handlers), root.level, logging.getLogRecordFactory(), random.getstate()]


def _round(engine: Any, requests: list[Any], lost: list[str], cancel_after: int | None) -> list[Any]:
    """Run requests to their end, without those that are lost; cancel the first after so many steps."""
    from dataclasses import asdict

    from worker.engine import EmbeddingRequest, Request, Sampling

    engine.on_admit = lambda ids: set(ids) & set(lost)
    for asked in requests:
        if "inputs" in asked:
            engine.add([EmbeddingRequest(asked["id"], tuple(asked["inputs"]))])
            continue
        wanted = asked["sampling"]
        wanted["stop"] = tuple(wanted["stop"])
        wanted["logit_bias"] = tuple((id, bias) for id, bias in wanted["logit_bias"])
        engine.add([Request(asked["id"], asked["prompt_ids"], Sampling(**wanted), root=asked["root"])])
    done = []
    while engine.has_work:
        if cancel_after is not None:
            if cancel_after == 0:
                engine.cancel([requests[0]["id"]])
            cancel_after -= 1
        done += [asdict(completion) for completion in engine.step()]
    return done


if __name__ == "__main__":
    main()
