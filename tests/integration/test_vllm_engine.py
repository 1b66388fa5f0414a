"""Our vLLM engine with vLLM itself, beside our own engine: equal up to ties, and what is not is refused.

Runs where vLLM is: in this Python, or in the environment of `python -m bench.peers.build vllm`.
"""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench.peers import build
from tests.integration.engine_reference import is_tie
from tests.unit import planning
from worker.engine import Completion, Engine, EngineConfig, Request, Sampling, loader, smollm2

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
NEW_TOKENS = 24
BLOCK = 128
"""Tokens of a block of vLLM's on a CPU: what is shared is whole blocks."""


def _python() -> str:
    """Return a Python that has vLLM."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    python = build.VENVS / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("vLLM is not installed: python -m bench.peers.build vllm")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not (python.parents[1] / "lib" / version).is_dir():
        pytest.skip(f"vLLM is installed for another Python than {version}")
    return str(python)


def _child(
    directory: Path, *arguments: str, given: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the child. The packages of this Python come last on its path: they have what vLLM's lacks."""
    packages = sysconfig.get_path("purelib")
    (directory / "sitecustomize.py").write_text(f"import sys\nsys.path.append({packages!r})\n")
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(directory)))}
    return subprocess.run(
        [_python(), str(ROOT / "tests" / "integration" / "vllm_child.py"), *arguments],
        input=given,
        cwd=ROOT,
        env=os.environ | path | variables,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def _request(id: str, prompt: list[int], root: str = "", **sampling: Any) -> Request:
    return Request(
        id, prompt, Sampling(**{"max_tokens": NEW_TOKENS, "temperature": 0.0, **sampling}), root=root
    )


def _round(*requests: Any, lost: tuple[str, ...] = (), cancel_after: int | None = None) -> dict[str, Any]:
    asked = [request if isinstance(request, dict) else asdict(request) for request in requests]
    return {"requests": asked, "lost": lost, "cancel_after": cancel_after}


@pytest.fixture(scope="module")
def ours() -> Iterator[Engine]:
    _python()
    engine = Engine.load(str(smollm2.ensure()), EngineConfig(device="cpu"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(ours: Engine) -> list[list[int]]:
    """Source code in pieces of many lengths, and a chat, whose answer ends by itself."""
    text = Path(os.__file__).read_text()
    ids: list[int] = ours.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    lengths = (1, 7, 200, 90, 30, 150, 3, 60, 300, 11, 45)
    pieces = [ids[500 + 311 * n : 500 + 311 * n + length] for n, length in enumerate(lengths)]
    chat = "<|im_start|>user\nWhat is 2+2? Answer with one number.<|im_end|>\n<|im_start|>assistant\n"
    return [*pieces, ours.tokenizer(chat, add_special_tokens=False)["input_ids"]]


@pytest.fixture(scope="module")
def requests(ours: Engine, prompts: list[list[int]]) -> dict[str, Request]:
    """What both engines run in the first round: all of it is greedy."""
    free = {c.id: c for c in ours.generate(_request(str(n), p) for n, p in enumerate(prompts))}
    code, chat = prompts[3], prompts[-1]
    stop = free["3"].text[20:24]
    ends_after = len(free[str(len(prompts) - 1)].token_ids)
    assert free[str(len(prompts) - 1)].finish_reason == "stop"
    made = [_request(f"greedy-{n}", prompt, logprobs=3) for n, prompt in enumerate(prompts)]
    made += [
        _request("stop", code, stop=(stop,)),
        _request("special stop", chat, stop=("<|im_end|>",)),
        _request("late stop", code, stop=(stop,), min_tokens=NEW_TOKENS - 2),
        _request("short", code, max_tokens=1),
        _request("held back", chat, min_tokens=ends_after + 1),
        _request("exactly", chat, min_tokens=ends_after),
        _request("no end", chat, ignore_eos=True),
        _request("repetition", code, repetition_penalty=1.3),
        _request("presence", code, presence_penalty=1.5, frequency_penalty=0.5),
        _request("bias", code, logit_bias=((30, 100.0),), max_tokens=4),
        _request("top 1", code, temperature=1.0, top_k=1),
        _request("twice", code, n=2),
    ]
    return {request.id: request for request in made}


@pytest.fixture(scope="module")
def expected(ours: Engine, requests: dict[str, Request]) -> dict[str, Completion]:
    return {completion.id: completion for completion in ours.generate(requests.values())}


@pytest.fixture(scope="module")
def theirs(
    prompts: list[list[int]], requests: dict[str, Request], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Everything that vLLM is asked in these tests: its loading takes a minute."""
    long, other = prompts[8], prompts[2]
    drawn = {"temperature": 1.0, "n": 2, "seed": 5}
    rounds = [
        _round(*requests.values()),
        _round(_request("drawn", prompts[3], **drawn), _request("mate", prompts[4], temperature=1.0)),
        _round(_request("drawn", prompts[3], **drawn)),
        _round(_request("first", long, root="one")),
        _round(_request("again", long, root="one"), _request("stranger", long, root="two")),
        _round(_request("kept", other), _request("lost", other), lost=("lost",)),
        _round(_request("stopped", other, max_tokens=500, ignore_eos=True), cancel_after=4),
        _round(
            _request("grammar", other, grammar="start: /a+/"),
            _request("prompt", other, prompt_logprobs=True),
            _request("hot", other, temperature=2.5),
            _request("full", [1] * 2048),
            {"id": "embed", "inputs": [other]},
            _request("fine", other),
        ),
    ]
    child = _child(
        tmp_path_factory.mktemp("vllm"), given=json.dumps({"model": str(smollm2.ensure()), "rounds": rounds})
    )
    assert child.returncode == 0, child.stderr[-4000:]
    answer = json.loads(child.stdout.splitlines()[-1])
    assert answer, child.stderr[-4000:]
    answer["rounds"] = [{done["id"]: done for done in one} for one in answer["rounds"]]
    return answer


def test_greedy_is_equal_to_our_engine_up_to_ties(
    theirs: dict[str, Any], expected: dict[str, Completion], prompts: list[list[int]]
) -> None:
    reference: loader.Loaded | None = None
    for n, prompt in enumerate(prompts):
        got, wanted = theirs["rounds"][0][f"greedy-{n}"], expected[f"greedy-{n}"]
        if got["token_ids"] != wanted.token_ids:
            reference = reference or loader.load(str(smollm2.ensure()), EngineConfig(device="cpu"))
            assert is_tie(reference, prompt, wanted.token_ids, got["token_ids"]), n
        else:
            assert (got["text"], got["finish_reason"]) == (wanted.text, wanted.finish_reason)


@pytest.mark.parametrize(
    "id",
    [
        *("stop", "special stop", "late stop", "short", "held back", "exactly", "no end"),
        *("repetition", "presence", "bias", "top 1", "twice"),
    ],
)
def test_a_parameter_does_what_it_does_in_our_engine(
    theirs: dict[str, Any], expected: dict[str, Completion], id: str
) -> None:
    got, wanted = theirs["rounds"][0][id], expected[id]
    assert (got["token_ids"], got["text"]) == (wanted.token_ids, wanted.text)
    assert (got["finish_reason"], len(got["others"])) == (wanted.finish_reason, len(wanted.others))


def test_log_probabilities_are_close_to_ours(
    theirs: dict[str, Any], expected: dict[str, Completion], prompts: list[list[int]]
) -> None:
    compared = 0
    for n in range(len(prompts)):
        got, wanted = theirs["rounds"][0][f"greedy-{n}"], expected[f"greedy-{n}"]
        if got["token_ids"] != wanted.token_ids:
            continue
        assert wanted.logprobs is not None
        for a, b in zip(got["logprobs"], wanted.logprobs, strict=True):
            assert (a["token_id"], len(a["top"])) == (b.token_id, 3)
            assert a["logprob"] == pytest.approx(b.logprob, abs=1e-3)
            assert [value for _, value in a["top"]] == pytest.approx([v for _, v in b.top], abs=1e-3)
            compared += 1
    assert compared > 100


def test_a_draw_depends_on_its_seed_and_not_on_batch_mates(theirs: dict[str, Any]) -> None:
    together, alone = theirs["rounds"][1]["drawn"], theirs["rounds"][2]["drawn"]
    assert together["token_ids"] == alone["token_ids"]
    assert together["others"][0]["token_ids"] == alone["others"][0]["token_ids"]
    assert alone["token_ids"] != alone["others"][0]["token_ids"]


def test_prefixes_are_found_again_by_their_own_tenant_alone(
    theirs: dict[str, Any], prompts: list[list[int]]
) -> None:
    shared = (len(prompts[8]) - 1) // BLOCK * BLOCK
    assert theirs["rounds"][3]["first"]["cached_tokens"] == 0
    assert theirs["rounds"][4]["again"]["cached_tokens"] == shared > 0
    assert theirs["rounds"][4]["stranger"]["cached_tokens"] == 0
    again, first = theirs["rounds"][4]["again"], theirs["rounds"][3]["first"]
    assert again["token_ids"] == first["token_ids"]


def test_lost_requests_never_run_and_cancelled_ones_end(theirs: dict[str, Any]) -> None:
    assert set(theirs["rounds"][5]) == {"kept"}
    stopped = theirs["rounds"][6]["stopped"]
    assert stopped["finish_reason"] == "cancelled"
    assert 0 < len(stopped["token_ids"]) < 10
    assert theirs["held"] == []
    assert theirs["stats"]["kv_bytes_in_use"] == 0


def test_what_vllm_cannot_do_is_one_line_and_harms_nobody(theirs: dict[str, Any]) -> None:
    done = theirs["rounds"][7]
    assert done["fine"]["error"] is None
    for id in ("grammar", "prompt", "hot", "embed"):
        assert "engine vllm" in done[id]["error"]
    assert "context" in done["full"]["error"]


def test_the_process_is_as_it_was(theirs: dict[str, Any]) -> None:
    assert theirs["unchanged"], "signal handlers, logging or `random` have changed"


def test_counters_add_up(theirs: dict[str, Any]) -> None:
    stats = theirs["stats"]
    asked = sum(len(one) for one in theirs["rounds"]) + 1  # the lost one
    assert stats["requests_added"] == asked
    assert (stats["requests_failed"], stats["requests_cancelled"]) == (5, 1)
    assert stats["requests_finished"] == asked - 7
    assert stats["prefix_tokens_reused"] > 0
    assert 0 < stats["decode_steps"] < stats["steps"]


def test_the_command_runs_a_file_through_vllm(tmp_path: Path) -> None:
    lines = [planning.line(f"r{n}", f"Count to {n}.", temperature=0) for n in range(3)]
    lines.append(planning.line("json", "Hi", response_format={"type": "json_object"}))
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    model = {"source": str(smollm2.ensure()), "engine": "vllm", "context_tokens": 2048}
    ran = _child(
        tmp_path,
        *("run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", "m"),
        LONGHAUL_MODELS=json.dumps({"m": model}),
        LONGHAUL_KV_MEMORY_BYTES=str(1 << 28),
    )
    assert ran.returncode == 3, ran.stderr[-4000:]
    done = [orjson.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [line["custom_id"] for line in done] == ["r0", "r1", "r2"]
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 4 for line in done)
    [failed] = [orjson.loads(line) for line in (tmp_path / "out.errors.jsonl").read_bytes().splitlines()]
    assert "grammar" in orjson.dumps(failed).decode()
