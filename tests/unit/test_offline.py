import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import click
import orjson
import pytest
from click.testing import CliRunner, Result

from jobs import cli, errors, finalize, results
from jobs.records import PartEntry
from jobs.store_local import LocalStore
from tests.unit.planning import TEXT, line, request
from worker import offline, offline_job
from worker.engine import tiny
from worker.engine.echo import EchoEngine
from worker.interrupts import Interrupts


class Running:
    """Runs `longhaul run` in this process on the echo engine."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self.model = directory, model
        self.source, self.output = directory / "in.jsonl", directory / "out.jsonl"
        self.work = directory / "out.jsonl.longhaul"

    def __call__(self, *lines: bytes, options: tuple[str, ...] = ()) -> Result:
        if lines:
            self.source.write_bytes(b"".join(lines))
        command = ["run", str(self.source), "-o", str(self.output), "--model", str(self.model)]
        group = cli.Commands("longhaul", commands={"run": offline.run})
        return CliRunner().invoke(group, [*command, "--engine", "echo", *options])

    def lines(self, kind: str = "output") -> list[dict[str, Any]]:
        path = self.output if kind == "output" else self.directory / f"out.{kind}.jsonl"
        return [orjson.loads(data) for data in path.read_bytes().splitlines()] if path.exists() else []

    def names(self, kind: str = "output") -> list[str]:
        return [entry["custom_id"] for entry in self.lines(kind)]

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.work)

    @property
    def job_id(self) -> str:
        return str(orjson.loads(self.store.get("run.json"))["job_id"])

    def rows_in_parts(self) -> list[int]:
        names = results.list_parts(self.store, self.job_id)
        return [row.row for n in names for row in results.read_part(self.store, self.job_id, PartEntry(n))]


@pytest.fixture
def run(tmp_path: Path, tokenizer_dir: Path) -> Running:
    return Running(tmp_path, tokenizer_dir)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids that the engine was given."""
    ids: list[str] = []
    add = EchoEngine.add

    def counted(self: EchoEngine, requests: Any) -> None:
        requests = list(requests)
        ids.extend(request.id for request in requests)
        add(self, requests)

    monkeypatch.setattr(EchoEngine, "add", counted)
    return ids


def _break_after(monkeypatch: pytest.MonkeyPatch, steps: int, error: BaseException) -> None:
    """Let the engine raise instead of its next step after some."""
    step, done = EchoEngine.step, 0

    def breaking(self: EchoEngine) -> Any:
        nonlocal done
        if done == steps:
            monkeypatch.setattr(EchoEngine, "step", step)
            raise error
        done += 1
        return step(self)

    monkeypatch.setattr(EchoEngine, "step", breaking)


def test_results_come_in_input_order_with_metrics_and_a_summary(run: Running) -> None:
    lengths = [5, 400, 1, 200, 30]
    done = run(*(line(f"r{n}", "x" * length) for n, length in enumerate(lengths)))
    assert done.exit_code == 0, done.output
    assert run.names() == run.names("metrics") == [f"r{n}" for n in range(5)]
    assert run.lines("errors") == []
    summary = orjson.loads((run.directory / "out.summary.json").read_bytes())
    assert summary["counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert "5 completed, 0 failed of 5" in done.output


def test_text_with_odd_separators_comes_back_intact(run: Running) -> None:
    text = "a\u2028b\u0085c"
    raw = json.dumps(request("a", text, max_tokens=80), ensure_ascii=False).encode()
    assert run(raw).exit_code == 0
    (found,) = run.lines()
    assert text in found["response"]["body"]["choices"][0]["message"]["content"]


def test_each_request_ends_by_its_own_max_tokens(run: Running) -> None:
    run(*(line(f"r{n}", max_tokens=n) for n in range(1, 6)))
    used = [found["response"]["body"]["usage"]["completion_tokens"] for found in run.lines()]
    assert used == [1, 2, 3, 4, 5]


def test_some_failures_exit_with_three(run: Running) -> None:
    done = run(line("a"), line("b", max_tokens=-1), line("c"))
    assert done.exit_code == 3
    assert (run.names(), run.names("errors")) == (["a", "c"], ["b"])
    assert run.lines("errors")[0]["response"]["status_code"] == 400


def test_a_run_of_failures_only_loads_no_engine_and_leaves_an_empty_output(
    run: Running, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_job.engine, "open_engine", None)
    done = run(line("a", max_tokens=0), line("b", foo=1))
    assert done.exit_code == 3, done.output
    assert run.output.read_bytes() == b""
    assert run.names("errors") == ["a", "b"]
    assert not (run.directory / "out.metrics.jsonl").exists()


def test_an_error_of_the_engine_is_a_line_and_others_finish(run: Running) -> None:
    done = run(line("a"), line("b", "poison"), line("c"), options=("--fault", "raise:poison"))
    assert done.exit_code == 3
    assert (run.names(), run.names("errors")) == (["a", "c"], ["b"])
    assert run.lines("errors")[0]["error"]["code"] == "engine_error"


@pytest.mark.parametrize("data", [b"", b"\n \n\r\n"])
def test_a_file_of_blank_lines_is_wrong_input(run: Running, data: bytes) -> None:
    run.source.write_bytes(data)
    done = run()
    assert done.exit_code == 4
    assert "empty_file" in done.output
    assert not run.output.exists()


def test_wrong_input_names_file_line_and_code_and_leaves_nothing(run: Running) -> None:
    done = run(line("a"), b"\n", b"{\n", line("a"))
    assert done.exit_code == 4
    assert "in.jsonl: line 3: This line is not JSON" in done.output
    assert "(duplicate_custom_id)" in done.output
    assert not run.work.exists()
    assert run(line("a")).exit_code == 0


def test_of_many_wrong_lines_a_few_are_shown(run: Running) -> None:
    done = run(*[b"{\n"] * 25)
    assert done.exit_code == 4
    assert done.output.count("invalid_json_line") == 10
    assert "in.jsonl: and 15 more" in done.output


def test_a_line_over_the_limit_is_wrong_input(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_MAX_LINE_BYTES", "1000")
    done = run(line("a", "x" * 2000), line("b"))
    assert done.exit_code == 4
    assert "line 1: The line is longer than 1000 bytes" in done.output


def test_an_endpoint_that_is_not_run_is_wrong_input(run: Running) -> None:
    done = run(line("a").replace(b"/v1/chat/completions", b"/v1/responses"))
    assert done.exit_code == 4
    assert "/v1/responses" in done.output
    assert "invalid_url" in done.output


def test_text_completions_run_too(run: Running) -> None:
    whole = {"custom_id": "a", "method": "POST", "url": TEXT, "body": {"model": "m", "prompt": "hi there"}}
    assert run(orjson.dumps(whole)).exit_code == 0
    assert run.lines()[0]["response"]["body"]["object"] == "text_completion"


def test_a_finished_run_only_reports(run: Running, ran: list[str]) -> None:
    first = run(line("a"), line("b", max_tokens=0))
    before, count = run.output.read_bytes(), len(ran)
    run.output.unlink()
    again = run()
    assert (first.exit_code, again.exit_code) == (3, 3)
    assert (run.output.read_bytes(), len(ran)) == (before, count)


def test_an_interrupted_run_goes_on_from_its_finished_rows(
    run: Running, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_after(monkeypatch, 3, KeyboardInterrupt())
    lines = [line(f"r{n}", f"{n}", max_tokens=-1 if n == 4 else 4) for n in range(10)]
    done = run(*lines, options=("--max-running", "2"))
    assert done.exit_code == 130
    assert "goes on from here" in done.output
    finished = run.rows_in_parts()
    assert len(finished) == 7
    ran.clear()
    assert run(options=("--max-running", "2")).exit_code == 3
    assert not {f"{run.job_id}:{row}" for row in finished} & set(ran)
    assert run.names() == [f"r{n}" for n in range(10) if n != 4]


def test_a_signal_lets_the_step_finish_and_keeps_its_rows(
    run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = EchoEngine.step

    def signalled(self: EchoEngine) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(EchoEngine, "step", signalled)
    done = run(*(line(f"r{n}", f"{n}") for n in range(10)), options=("--max-running", "4"))
    assert done.exit_code == 130
    assert len(run.rows_in_parts()) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_signal_does_not_wait() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_crash_of_the_engine_keeps_what_is_finished(
    run: Running, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_after(monkeypatch, 2, RuntimeError("device lost"))
    done = run(*(line(f"r{n}", f"{n}") for n in range(8)), options=("--max-running", "2"))
    assert isinstance(done.exception, RuntimeError)
    assert len(run.rows_in_parts()) == 4
    ran.clear()
    assert run().exit_code == 0
    assert len(ran) == 4
    assert run.names() == [f"r{n}" for n in range(8)]


def test_an_interrupted_plan_is_made_anew_with_each_refusal_once(
    run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = offline_job._Sink.release

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(offline_job._Sink, "release", release)
        raise KeyboardInterrupt

    monkeypatch.setattr(offline_job._Sink, "release", interrupted)
    assert run(line("a"), line("b", max_tokens=0)).exit_code == 130
    assert run.rows_in_parts() == [1]
    assert run().exit_code == 3
    assert (run.names(), run.names("errors")) == (["a"], ["b"])


def test_followers_of_a_finished_request_do_not_run_again(
    run: Running, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_after(monkeypatch, 1, KeyboardInterrupt())
    lines = [line(f"r{n}", f"{n // 2}", temperature=0) for n in range(6)]
    assert run(*lines, options=("--max-running", "1")).exit_code == 130
    assert run().exit_code == 0
    assert len(ran) == len(set(ran)) + 1 == 4  # the second was waiting when the run was interrupted
    assert run.names() == [f"r{n}" for n in range(6)]
    assert [found["deduplicated_from"] for found in run.lines("metrics")] == [
        None if n % 2 == 0 else f"r{n - 1}" for n in range(6)
    ]


@pytest.mark.parametrize("change", ["input", "model", "served name", "chat template"])
def test_another_run_into_the_same_output_is_refused(run: Running, tmp_path: Path, change: str) -> None:
    assert run(line("a")).exit_code == 0
    before = run.output.read_bytes()
    if change == "input":
        done = run(line("b"))
    elif change == "model":
        run.model = tmp_path
        done = run()
    elif change == "chat template":
        done = run(options=("--chat-template", str(_template(tmp_path))))
    else:
        done = run(options=("--served-name", "n"))
    assert done.exit_code == 1
    assert f"belongs to a run with another {change}" in done.output
    assert run.output.read_bytes() == before


def test_chats_are_rendered_with_a_template_of_the_users_own(run: Running, tmp_path: Path) -> None:
    options = ("--chat-template", str(_template(tmp_path)))
    assert run(line("a", "abc", max_tokens=100), options=options).exit_code == 0
    assert run.lines()[0]["response"]["body"]["choices"][0]["message"]["content"] == "ours: abc"


def _template(directory: Path) -> Path:
    path = directory / "own.jinja"
    path.write_text("ours: {{ messages[0].content }}")
    return path


def test_overwrite_begins_anew(run: Running) -> None:
    run(line("a"), line("b", max_tokens=0))
    assert run(line("c"), options=("--overwrite",)).exit_code == 0
    assert run.names() == ["c"]
    assert not (run.directory / "out.errors.jsonl").exists()


def test_a_run_that_never_began_does_not_stand_in_the_way(run: Running, tmp_path: Path) -> None:
    right, run.model = run.model, tmp_path / "typo"
    done = run(line("a"))
    assert done.exit_code == 1
    assert "no such directory" in done.output
    run.model = right
    assert run(line("b")).exit_code == 0
    assert run.names() == ["b"]


def test_the_same_model_by_another_path_is_the_same(
    run: Running, monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    run(line("a"))
    monkeypatch.chdir(run.model.parent)
    run.model = Path(run.model.name)
    assert run(options=("--served-name", "m")).exit_code == 0
    assert len(ran) == 1


def test_a_served_name_must_be_that_of_the_lines(run: Running) -> None:
    done = run(line("a"), options=("--served-name", "other"))
    assert done.exit_code == 4
    assert "model_not_found" in done.output


def test_the_output_may_lie_in_a_directory_that_is_not_there_yet(run: Running, tmp_path: Path) -> None:
    run.output = tmp_path / "new" / "place" / "done"
    assert run(line("a", max_tokens=-1), line("b")).exit_code == 3
    assert sorted(path.name for path in run.output.parent.iterdir()) == [
        "done",
        "done.errors.jsonl",
        "done.longhaul",
        "done.metrics.jsonl",
        "done.summary.json",
    ]


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl", "out.metrics.jsonl", "./x/../out.jsonl"])
def test_a_run_never_writes_over_its_input(run: Running, name: str) -> None:
    (run.directory / "x").mkdir()
    run.source = run.directory / name
    done = run(line("a"))
    assert done.exit_code == 2
    assert run.source.read_bytes() == line("a")


def test_a_damaged_part_runs_again(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_after(monkeypatch, 2, KeyboardInterrupt())
    assert run(*(line(f"r{n}", f"{n}") for n in range(6)), options=("--max-running", "2")).exit_code == 130
    (name,) = results.list_parts(run.store, run.job_id)
    path = run.store.path(results.part_key(run.job_id, name))
    path.write_bytes(path.read_bytes()[:-20])
    done = run()
    assert done.exit_code == 0
    assert "is damaged: its requests run again" in done.output
    assert run.names() == [f"r{n}" for n in range(6)]


@pytest.mark.parametrize("key", ["run.json", "job.json", "plan.json"])
def test_a_damaged_directory_is_named(run: Running, key: str) -> None:
    assert run(line("a")).exit_code == 0
    run.store.delete(finalize.manifest_key(run.job_id))
    path = run.store.path("run.json" if key == "run.json" else f"jobs/{run.job_id}/{key}")
    path.write_bytes(b"{")
    done = run()
    assert done.exit_code == 1
    assert f"{key} is damaged" in done.output
    assert run(options=("--overwrite",)).exit_code == 0


def test_a_file_where_the_directory_should_be_is_explained(run: Running) -> None:
    run.work.write_bytes(b"")
    done = run(line("a"))
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit | click.ClickException)
    assert "out.jsonl.longhaul" in done.output


def test_a_group_on_a_real_model_gives_each_request_what_it_gets_alone(run: Running, tmp_path: Path) -> None:
    run.model = tiny.tiny_model(tmp_path / "model")
    bodies: list[dict[str, Any]] = [
        {"content": "x", "temperature": 0, "max_tokens": 12},
        {"content": "seven 7", "temperature": 0, "max_tokens": 5, "ignore_eos": True},
        {"content": "y" * 200, "temperature": 0, "max_tokens": 9},
        {"content": "z", "seed": 1, "max_tokens": 8, "top_k": 20},
        {"content": "w", "max_tokens": 2, "stop": ["b", "\n"]},
    ]
    lines = [line(f"r{n}", **body) for n, body in enumerate(bodies)]
    assert run(*lines, options=("--engine", "auto")).exit_code == 0
    together = [found["response"]["body"] for found in run.lines()]
    for n in range(4):
        assert run(lines[n], options=("--engine", "auto", "--overwrite")).exit_code == 0
        alone = run.lines()[0]["response"]["body"]
        assert alone["choices"] == together[n]["choices"]
        assert alone["usage"]["completion_tokens"] == together[n]["usage"]["completion_tokens"]
    assert together[1]["usage"]["completion_tokens"] == 5
    assert together[4]["usage"]["completion_tokens"] <= 2


def test_the_summary_is_printed_as_json_when_asked(run: Running) -> None:
    done = run(line("a"), options=("--json",))
    assert orjson.loads(done.stdout)["counts"]["total"] == 1


def test_parts_are_written_while_the_run_goes_on(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_FLUSH_BYTES", "1")
    assert run(*(line(f"r{n}", f"{n}") for n in range(6)), options=("--max-running", "2")).exit_code == 0
    assert len(results.list_parts(run.store, run.job_id)) == 3


@pytest.fixture(autouse=True)
def _plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def test_a_run_that_fails_before_any_request_leaves_nothing(run: Running) -> None:
    run.model = run.directory / "nope"
    assert run(line("a")).exit_code == 1
    assert [path.name for path in run.directory.iterdir() if path.name.startswith("out")] == []


def test_a_run_that_fails_later_keeps_what_it_has(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise errors.StoreUnreachable(url="file://x", reason="No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr(finalize, "publish", full)
        done = run(line("a"))
    assert done.exit_code == 1
    assert "No space left on device. Make room" in done.output
    assert run.rows_in_parts() == [0]
    assert run(line("a")).exit_code == 0


def test_a_run_that_fails_keeps_what_an_earlier_one_left(
    run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_after(monkeypatch, 0, KeyboardInterrupt())
    assert run(line("a")).exit_code == 130
    run.model = run.directory / "nope"
    assert run(line("a")).exit_code == 1
    assert run.work.is_dir()


def test_an_output_that_is_no_file_is_not_replaced(run: Running) -> None:
    os.mkfifo(run.output)
    done = run(line("a"))
    assert (done.exit_code, run.output.is_fifo()) == (2, True)
    assert "is no file" in done.output


def test_a_removal_that_was_killed_halfway_leaves_nothing_half(
    run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(line("a"), line("b")).exit_code == 0
    remove = shutil.rmtree

    def killed(directory: Any, **options: Any) -> None:
        if any(found := list(Path(directory).rglob("job.json"))):
            found[0].unlink()
            raise KeyboardInterrupt
        remove(directory, **options)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        assert run(options=("--overwrite",)).exit_code == 130
    assert run().exit_code == 0
    assert run.names() == ["a", "b"]
    assert run(options=("--overwrite",)).exit_code == 0
    assert {path.name for path in run.directory.iterdir() if path.is_dir()} == {run.work.name}
