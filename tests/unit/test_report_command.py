"""`longhaul report`: of a server's job and of what `longhaul run` left, as a page, pictures and JSON."""

import json
import os
import re
import sys
import time
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from click.testing import CliRunner, Result

from jobs import cli, client, commands, download
from jobs import errors as problems
from jobs.report import charts, sources
from tests.unit.report import lines
from tests.unit.test_client import batch

pytest.importorskip("matplotlib")
HOSTILE = "$\\frac{$\u202e\U0001f600</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u0000"
"""No formula, no glyph for it in a font, and elements that would do something."""
ALL = {
    *charts.LATENCIES, *charts.LENGTHS, "tokens_over_time", "batch_over_time", "prefix_levels", "prefix_tree",
    "errors",
}  # fmt: skip


class Files(dict[str, bytes]):
    """What the API has: files by id. `job` is what it says of the job."""

    job: dict[str, Any]
    refuses = "nothing"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.refuses in request.url.path:
            return httpx.Response(400, json={"error": {"message": "Not now.", "code": None}})
        match request.url.path.removeprefix("/v1/").split("/"):
            case ["batches", _]:
                return httpx.Response(200, json=self.job)
            case ["files", name, "content"] if name in self:
                return httpx.Response(200, content=self[name])
        error = {"message": "No such file.", "type": "x", "param": None, "code": None}
        return httpx.Response(404, json={"error": error})


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Files:
    """An API with one finished job."""
    found = Files()
    found.job = batch(status="completed", request_counts={"total": 2, "completed": 1, "failed": 1})
    found["file-1_summary"] = orjson.dumps(lines.summary(1, 1))
    found["file-1_metrics"] = lines.metrics() + b"\n"
    found["file-1_errors"] = lines.refused("b", code="invalid_value", param="n") + b"\n"

    class Session(commands.Session):
        def connect(self, patience_seconds: float = 5.0) -> client.Client:
            return client.Client("http://api", transport=httpx.MockTransport(found))

    monkeypatch.setattr(commands, "Session", Session)
    return found


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["report", *arguments])


def left_by_run(metrics: list[bytes], errors: list[bytes] = [], **summary: Any) -> None:  # noqa: B006
    """Write what a `longhaul run -o out.jsonl` leaves."""
    Path("out.metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in metrics))
    if errors:
        Path("out.errors.jsonl").write_bytes(b"".join(line + b"\n" for line in errors))
    found = lines.summary(len(metrics), len(errors), **summary)
    Path("out.summary.json").write_bytes(orjson.dumps(found))


class Elements(HTMLParser):
    """The elements of a page: names and attributes; fails when one is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def all(self, name: str) -> list[str]:
        """The values of an attribute."""
        return [value for found, value in self.attributes if found == name]


def test_a_job_becomes_a_page_with_every_plot_and_the_numbers_below_it(api: Files) -> None:
    result = report("batch_1", "-o", "new/report.html")
    assert (result.exit_code, result.stdout) == (3, "new/report.html\n")
    page = Path("new/report.html").read_text()
    elements = Elements(page)
    assert {name.removesuffix("-title") for name in elements.all("aria-labelledby")} == ALL
    assert elements.names.count("svg") == elements.names.count("table") == len(ALL)
    assert len([label for label in elements.all("aria-label") if label]) == 2 * len(ALL)
    assert "invalid_value (n)" in page
    assert "The plan could share 4 of 20 prompt tokens (20.0 %); the engine shared 4 of 10 (40.0 %)." in page


def test_the_page_fetches_nothing_and_has_no_script_and_no_id_twice(api: Files) -> None:
    report("batch_1", "-o", "report.html")
    elements = Elements(Path("report.html").read_text())
    assert not {"script", "link", "img", "iframe", "object"} & set(elements.names)
    assert {value[0] for value in [*elements.all("xlink:href"), *elements.all("href")]} <= {"#"}
    assert not elements.all("src")
    ids = elements.all("id")
    assert len(ids) == len(set(ids)) > len(ALL)
    referred = re.findall(r"url\(#([^)]+)\)", Path("report.html").read_text())
    assert set(referred) <= set(ids)


def test_hostile_texts_stay_texts(api: Files) -> None:
    api.job |= {"model": HOSTILE, "endpoint": "/v1/completions"}
    api["file-1_errors"] = lines.lost(HOSTILE, HOSTILE, HOSTILE) + b"\n"
    assert report("batch_1", "-o", "report.html", "--png", "report.png").exit_code == 3
    elements = Elements(Path("report.html").read_text())
    assert not {"script", "img"} & set(elements.names)
    assert not elements.all("onerror")
    shown = Path("report.html").read_text()
    assert shown.count("&lt;script&gt;alert(1)") >= 4
    drawings = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    assert drawings
    assert all(drawing.replace("\N{EN DASH}", "").isascii() for drawing in drawings)


def test_colors_are_left_to_the_style_sheet(api: Files) -> None:
    report("batch_1", "-o", "report.html")
    page = Path("report.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == len(ALL)
    assert {color.lower() for text in drawings for color in re.findall(r"#[0-9a-fA-F]{6}\b", text)} == set()
    used = {name for text in drawings for name in re.findall(r"var\((--[a-z]+)\)", text)}
    assert used <= set(re.findall(r"(--[a-z]+):", page))
    assert "prefers-color-scheme: dark" in page


def test_pictures_are_one_file_or_one_for_each_plot(api: Files) -> None:
    assert report("batch_1", "--png", "all.png").stdout == "all.png\n"
    assert Path("all.png").read_bytes().startswith(b"\x89PNG")
    printed = report("batch_1", "--png", "plots/").stdout.split()
    assert {Path(name).stem for name in printed} == ALL
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in printed)
    assert not list(Path().glob("*.html"))


def test_json_prints_the_figures_and_writes_nothing(api: Files, here: Path) -> None:
    result = report("batch_1", "--json")
    assert result.exit_code == 3
    (line,) = result.stdout.splitlines()
    found = orjson.loads(line)
    assert found["latency"]["ttft_seconds"]["p50"] == 2.0
    kinds = found["errors"]["kinds"]
    assert kinds["invalid_value (n)"] == {"count": 1, "message": "wrong", "examples": ["b"]}
    assert found["summary"]["prefixes"]["shared"] == 4
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_a_job_that_is_not_finished_has_no_report(api: Files, here: Path, status: str) -> None:
    api.job["status"] = status
    result = report("batch_1")
    assert result.exit_code == 1
    assert f"batch_1 is {status}" in result.stderr
    assert "live on http://api/#/job/batch_1" in result.stderr
    assert "longhaul watch batch_1" in result.stderr
    assert list(here.iterdir()) == []


def test_a_job_whose_input_was_wrong_shows_what_was_wrong(api: Files) -> None:
    api.clear()
    fault = {"code": "invalid_json_line", "message": "Not JSON", "param": None, "line": 7}
    api.job |= {"status": "failed", "errors": {"object": "list", "data": [fault]}}
    assert report("batch_1", "-o", "report.html").exit_code == 4
    page = Path("report.html").read_text()
    assert "invalid_json_line" in page
    assert "line 7" in page


def test_requests_that_a_cancelled_job_never_ran_are_told_and_are_no_errors(api: Files) -> None:
    api.job["status"] = "cancelled"
    api["file-1_errors"] += lines.lost("c", "Cancelled.", "batch_cancelled") + b"\n"
    assert report("batch_1", "-o", "report.html").exit_code == 4
    page = Path("report.html").read_text()
    assert "<dt>requests that never ran</dt><dd>1</dd>" in page
    assert "1 error of 1 kind" in page


def test_results_that_have_expired_are_said_to_be_gone(api: Files) -> None:
    api.clear()
    result = report("batch_1")
    assert result.exit_code == 1
    assert "batch_1 have expired or were deleted" in result.stderr


def test_a_server_that_refuses_a_file_is_not_taken_for_one_without_it(api: Files) -> None:
    api.refuses = "file-1_metrics"
    result = report("batch_1")
    assert result.exit_code == 1
    assert "Not now." in result.stderr


def test_a_job_whose_requests_all_failed_has_the_errors_alone(api: Files) -> None:
    del api["file-1_metrics"]
    api["file-1_summary"] = orjson.dumps(
        lines.summary(0, 1, tokens_per_second=None, prefixes=None, seconds=0.0, worker_seconds=0.0)
    )
    assert report("batch_1", "-o", "report.html", "--png", "report.png").exit_code == 3
    assert Elements(Path("report.html").read_text()).names.count("svg") == 1


def test_nothing_to_draw_is_said(api: Files) -> None:
    del api["file-1_metrics"], api["file-1_errors"]
    api["file-1_summary"] = orjson.dumps(lines.summary(0, 0, tokens_per_second=None, prefixes=None))
    assert report("batch_1", "-o", "report.html").exit_code == 3
    assert "nothing to draw" in Path("report.html").read_text()
    assert "nothing to draw" in report("batch_1", "--png", "x.png").stderr


def test_a_run_without_servers_is_read_from_its_files() -> None:
    left_by_run([lines.metrics()])
    result = report("out.jsonl")
    assert (result.exit_code, result.stdout) == (0, "out.report.html\n")
    assert "1 of 1" in Path("out.report.html").read_text()


def test_a_job_of_embeddings_has_no_plot_of_answers_or_prefixes() -> None:
    unknown = {"ttft_seconds": None, "inter_token_seconds": None}
    embedding = lines.metrics(completion_tokens=0, cached_tokens=0, choices=0, **unknown)
    left_by_run([embedding], prefixes=None, tokens_per_second=0.0)
    assert report("out.jsonl", "-o", "report.html").exit_code == 0
    page = Path("report.html").read_text()
    names = Elements(page).all("aria-labelledby")
    assert "Time to first token: not shown, as no request generated a token." in page
    assert "Answers: not shown, as no request generated a token." in page
    left = {"e2e_seconds", "queue_seconds", "tokens_over_time", "batch_over_time", "prompt_tokens"}
    assert {name.removesuffix("-title") for name in names} == left


def test_an_engine_that_does_not_tell_the_first_token_has_a_report_that_says_so() -> None:
    left_by_run([lines.metrics(ttft_seconds=None, inter_token_seconds=None, cached_tokens=None)])
    assert report("out.jsonl", "-o", "report.html").exit_code == 0
    page = Path("report.html").read_text()
    assert "Inter-token latency: not shown, as the engine that ran this job does not tell" in page
    assert "tokens_over_time-title" in page


def test_percentiles_are_those_of_the_summary() -> None:
    latency = {"e2e_seconds": {"p50": 8.987, "p90": 9.0, "p99": 9.0}, "ttft_seconds": None}
    left_by_run([lines.metrics(e2e_seconds=8.987), lines.metrics()], latency=latency)
    found = orjson.loads(report("out.jsonl", "--json").stdout)
    assert found["latency"]["e2e_seconds"]["p50"] == 8.987


def test_files_of_an_earlier_version_have_no_prefixes() -> None:
    left_by_run([lines.metrics()])
    summary = lines.summary()
    del summary["prefixes"], summary["draft_acceptance"]
    Path("out.summary.json").write_bytes(orjson.dumps(summary))
    assert report("out.jsonl").exit_code == 0


@pytest.mark.parametrize("option", ["-o", "--png"])
@pytest.mark.parametrize("name", ["out.jsonl", "./out.metrics.jsonl", "out.summary.json"])
def test_results_are_not_written_over(option: str, name: str) -> None:
    left_by_run([lines.metrics()])
    Path("out.jsonl").write_bytes(b"results")
    before = Path(name).read_bytes()
    assert report("out.jsonl", option, name).exit_code == 2
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("out.metrics.jsonl", b'{"custom_id": "a"}\n', "KeyError"),
        ("out.metrics.jsonl", b"no json\n", "out.metrics.jsonl"),
        ("out.errors.jsonl", b"[]\n", "TypeError"),
        ("out.summary.json", b"{}", "KeyError"),
        ("out.summary.json", b"[1]", "TypeError"),
    ],
)
def test_files_that_longhaul_did_not_write_are_refused(name: str, content: bytes, reason: str) -> None:
    left_by_run([lines.metrics()])
    Path(name).write_bytes(content)
    result = report("out.jsonl")
    assert result.exit_code == 1
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_is_not_there_or_not_finished_is_told() -> None:
    result = report("out.jsonl")
    assert result.exit_code == 1
    assert "out.summary.json is not there" in result.stderr


def test_what_is_no_file_is_not_replaced_by_one(here: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(problems.InvalidRequest), download.whole(Path("pipe")):
        pass
    assert Path("pipe").is_fifo()
    Path("link").symlink_to("page.html")
    with download.whole(Path("link")) as stream:
        stream.write(b"page")
    assert Path("link").is_symlink()
    assert Path("page.html").read_bytes() == b"page"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("-o", "-"), "name files"),
        (("-o", ""), "name files"),
        (("--png", "-"), "name files"),
        (("-o", "page.png"), "ends in .html"),
        (("-o", "page.pdf"), "ends in .html"),
        (("-o", "page"), "ends in .html"),
        (("-o", "there"), "ends in .html"),
        (("-o", "new.html/"), "ends in .html"),
        (("--png", "x.jpg"), "x.png or x/"),
        (("--png", "x.html"), "x.png or x/"),
        (("--png", "plots"), "plots.png or plots/"),
        (("-o", "page.html", "--png", "some/x.svg"), "some/x.png or some/x/"),
    ],
)
def test_a_report_goes_to_files_with_names_of_their_kind(
    api: Files, here: Path, more: tuple[str, ...], told: str
) -> None:
    (here / "there").mkdir()
    api.refuses = "/"  # nothing is asked before
    result = report("batch_1", *more)
    assert result.exit_code == 2
    assert told in result.stderr.replace("\n", " ")
    assert [path.name for path in here.iterdir()] == ["there"]


def test_names_in_capitals_and_directories_that_are_there_are_taken(api: Files, here: Path) -> None:
    (here / "there.jpg").mkdir()
    assert report("batch_1", "-o", "PAGE.HTM", "--png", "there.jpg").exit_code == 3
    assert report("batch_1", "--png", "ALL.PNG").stdout == "ALL.PNG\n"
    assert {path.stem for path in (here / "there.jpg").iterdir()} == ALL


@pytest.mark.parametrize("kind", ["metrics", "errors"])
def test_the_file_that_is_cut_is_the_one_that_is_named(kind: str) -> None:
    left_by_run([lines.metrics()], [lines.refused("b")])
    Path(f"out.{kind}.jsonl").write_bytes(b'{"custom_id": "a", "resp')
    assert f"out.{kind}.jsonl is not what Longhaul wrote" in report("out.jsonl").stderr


@pytest.mark.parametrize(
    "summary", [{"tokens_per_second": "x"}, {"tokens": None}, {"workers": None}, {"latency": "x"}]
)
def test_a_summary_without_what_is_shown_is_told(summary: dict[str, Any]) -> None:
    left_by_run([lines.metrics()], **summary)
    result = report("out.jsonl", "-o", "page.html")
    assert result.exit_code == 1
    assert re.search("(the summary of out.jsonl|out.summary.json) is not what Longhaul wrote", result.stderr)


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_name_of_nothing_is_no_run(name: str) -> None:
    assert "Give the id of a job" in report(name).stderr


def test_a_file_whose_name_is_no_text_has_a_report() -> None:
    left_by_run([lines.metrics()])
    for kind in ("metrics.jsonl", "summary.json"):
        Path(f"out.{kind}").rename(f"a\udcff.{kind}")
    assert (
        orjson.loads(report("a\udcff.jsonl", "--json").stdout)["name"] == "a\N{REPLACEMENT CHARACTER}.jsonl"
    )


def test_clocks_that_differ_make_no_negative_latencies() -> None:
    left_by_run([lines.metrics(e2e_seconds=-5.0, ttft_seconds=-3.0)])
    found = orjson.loads(report("out.jsonl", "--json").stdout)
    assert found["latency"]["ttft_seconds"]["least"] == 0


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    left_by_run([lines.metrics()])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = report("out.jsonl")
    assert result.exit_code == 1
    assert "pip install 'longhaul[report]'" in result.stderr
    assert report("out.jsonl", "--json").exit_code == 0


def test_a_report_holds_some_numbers_of_each_request_and_no_line() -> None:
    left_by_run([lines.metrics()] * 3000)
    tracemalloc.start()
    sources.of_run(Path("out.jsonl"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < Path("out.metrics.jsonl").stat().st_size / 2


@pytest.mark.long
def test_fifty_thousand_requests_take_seconds_and_make_a_small_page() -> None:
    left_by_run([lines.metrics(f"r{n}", started_at=n / 10, finished_at=n / 10 + 4) for n in range(50_000)])
    started = time.process_time()
    assert report("out.jsonl", "-o", "report.html").exit_code == 0
    assert time.process_time() - started < 10
    assert Path("report.html").stat().st_size < 500_000


@pytest.mark.parametrize(
    "changed",
    [{"finished_at": 1.7e308}, {"e2e_seconds": 1.7e308}, {"prompt_tokens": -7}, {"prompt_tokens": 10**4000}],
)
def test_numbers_that_no_job_has_are_told(changed: dict[str, Any]) -> None:
    left_by_run([lines.metrics(), json.dumps(orjson.loads(lines.metrics()) | changed).encode()])
    result = report("out.jsonl", "-o", "page.html")
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_summary_that_divides_by_nothing_is_told() -> None:
    prefixes = {**lines.summary()["prefixes"], "requests": 0}
    left_by_run([lines.metrics()], prefixes=prefixes)
    assert "is not what Longhaul wrote" in report("out.jsonl", "-o", "page.html").stderr
