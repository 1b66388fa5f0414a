import gzip
import io
import itertools
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import bodies, errors, ids, plan, rendering
from jobs.bodies import chat as body_chat
from jobs.records import ResultRow
from tests.unit import planning
from tests.unit.planning import Planned, Planning, line
from worker import translate

Requests = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "ab", "abc", "b" * 150, "a" * 150, "c" * 300]),
        st.sampled_from([{}, {"temperature": 0}, {"seed": 1}, {"max_tokens": -1}, {"max_tokens": 9999}]),
    ),
    min_size=1,
    max_size=30,
)


def _once(planned: Planned) -> list[int]:
    rows = [row for request in planned.requests for row in request.rows]
    return sorted(rows + [row.row for row in planned.refused])


def _order(requests: list[Any]) -> list[tuple[int, list[int], int]]:
    return [(-request.bucket, request.prompt_ids, request.row) for request in requests]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(Requests, st.integers(1, 12), st.integers(1, 7))
def test_each_row_is_planned_once_and_windows_are_sorted_by_bucket_and_tokens(
    planned: Planning, requests: list[tuple[str, dict[str, Any]]], window: int, shard: int
) -> None:
    data = b"".join(line(f"r{row}", text, **body) for row, (text, body) in enumerate(requests))
    found = planned(data, plan_window_requests=window, shard_requests=shard)
    assert found.total == len(requests)
    assert _once(found) == list(range(len(requests)))
    assert all(len(part) <= shard for part in found.shards)
    for first in range(0, len(requests), window):
        inside = [request for request in found.requests if first <= request.row < first + window]
        assert _order(inside) == sorted(_order(inside))
    assert [request.row // window for request in found.requests] == sorted(
        request.row // window for request in found.requests
    )
    assert sum(found.released) == len(found.requests)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "16", "\0", "text", "user", "<|im_end|>"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "tool_calls", "name"]), inner)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from([*body_chat.ChatBody.model_fields, *bodies.REFUSED, "prompt", "foo"]).filter(
    "model".__ne__
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.dictionaries(NAMES, JSON, max_size=3), min_size=1, max_size=8))
def test_whatever_a_body_holds_its_row_is_planned_or_refused(
    planned: Planning, requests: list[dict[str, Any]]
) -> None:
    for body in requests:
        body.pop("stream", None)
    found = planned(b"".join(line(f"r{row}", **body) for row, body in enumerate(requests)))
    assert _once(found) == list(range(len(requests)))
    for row in found.refused:
        orjson.dumps(row.line)
        assert row.line["response"]["body"]["error"]["message"]
    for request in found.requests:
        assert translate.engine_request(request).sampling.fault() is None
        assert 0 < len(request.prompt_ids) <= 2048 - request.params["max_tokens"]


def test_equal_prefixes_are_neighbours(planned: Planning) -> None:
    systems = [{"role": "system", "content": text} for text in ("one " * 20, "two " * 20, "onerous " * 9)]
    data = b"".join(
        line(f"{user}-{system}", messages=[systems[system], {"role": "user", "content": str(user)}])
        for user in range(9)
        for system in range(3)
    )
    order = [request.custom_id[-1] for request in planned(data).requests]
    assert sum(a != b for a, b in itertools.pairwise(order)) == 2


def test_windows_of_ten_release_thirty_five_requests_in_four(planned: Planning) -> None:
    data = b"".join(line(f"r{n}", f"{34 - n:02}") for n in range(35))
    found = planned(data, plan_window_requests=10, shard_requests=4)
    assert found.released == [10, 10, 10, 5]
    assert [len(part) for part in found.shards] == [4, 4, 2] * 3 + [4, 1]
    order = [request.row for request in found.requests]
    assert order == [*range(9, -1, -1), *range(19, 9, -1), *range(29, 19, -1), *range(34, 29, -1)]


def test_a_long_bucket_comes_first(planned: Planning) -> None:
    data = line("short", "a") + line("long", "a" * 500) + line("middle", "a" * 150)
    assert [request.custom_id for request in planned(data).requests] == ["long", "middle", "short"]


def test_a_shard_ends_early_when_its_prompts_are_long(planned: Planning) -> None:
    from jobs import window
    from jobs.prepared import Prepared

    with window.Window(planned.scratch) as opened:
        for row in range(5):
            prepared = Prepared(row, f"r{row}", "", True, {"temperature": 1.0, "seed": None})
            opened.add(planning.record(), prepared, [row] * 10)
        shards = list(opened.shards(planning.record(), "m", 100, most_tokens=15))
    assert [len(part) for part in shards] == [2, 2, 1]


def test_identical_deterministic_requests_run_once(planned: Planning) -> None:
    data = b"".join(
        [line(f"greedy{n}", "x", temperature=0) for n in range(3)]
        + [line(f"seeded{n}", "x", seed=5) for n in range(2)]
        + [line(f"random{n}", "x") for n in range(2)]
        + [line("longer", "x", temperature=0, max_tokens=5), line("other", "x", seed=6)]
        + [line("stops", "x", temperature=0, stop="b")]
    )
    found = planned(data)
    assert found.named("greedy0").followers == [[1, "greedy1"], [2, "greedy2"]]
    assert found.named("seeded0").followers == [[4, "seeded1"]]
    alone = {request.custom_id for request in found.requests if not request.followers}
    assert alone == {"random0", "random1", "longer", "other", "stops"}
    assert found.released == [7]


def test_deduplication_stays_inside_a_window(planned: Planning) -> None:
    data = b"".join(line(f"r{n}", "x", temperature=0) for n in range(4))
    found = planned(data, plan_window_requests=2)
    assert [request.rows for request in found.requests] == [[0, 1], [2, 3]]


def test_each_request_keeps_its_own_parameters(planned: Planning) -> None:
    data = line("a", max_tokens=2, stop=["x"]) + line("b", max_tokens=9) + line("c", temperature=0.5, seed=-1)
    found = planned(data)
    assert [found.named(name).params["max_tokens"] for name in "abc"] == [2, 9, 4]
    assert [found.named(name).params["stop"] for name in "abc"] == [["x"], [], []]
    assert [found.named(name).params["temperature"] for name in "abc"] == [1.0, 1.0, 0.5]
    assert found.named("c").params["seed"] == -1
    assert found.named("b").params["seed"] == ids.seed(f"{planning.record().id}:1")


def test_two_plans_of_one_job_are_equal(planned: Planning) -> None:
    data = b"".join(line(f"r{n}", f"{n % 5}", temperature=n % 2) for n in range(30))
    assert planned(data).shards == planned(data).shards


@pytest.mark.parametrize("text", ["a\u2028b\x85c", "\0", "\N{SNOWMAN}\U0001f600", "<|im_end|>"])
def test_odd_text_reaches_the_prompt_intact(planned: Planning, text: str) -> None:
    raw = json.dumps(planning.request("a", text), ensure_ascii=False).encode()
    (request,) = planned(raw).requests
    tokenizer = planned.tokenizer()
    rendered = tokenizer.template.render([{"role": "user", "content": text}])
    assert text in rendered
    assert [request.prompt_ids] == tokenizer.encode_chats([rendered])


@pytest.mark.parametrize("custom_id", [" a ", "\0", "a\u2028", "\N{SNOWMAN}", '"', "x" * 512, "1", "null"])
def test_a_custom_id_is_kept_byte_for_byte(planned: Planning, custom_id: str) -> None:
    data = line(custom_id, temperature=0) + line("a", temperature=0)
    found = planned(data)
    assert [request.custom_id for request in found.requests] == [custom_id]
    assert found.requests[0].followers == [[1, "a"]]


def test_a_text_completion_is_not_rendered(planned: Planning) -> None:
    def completion(custom_id: str, prompt: object) -> bytes:
        body = {"model": "m", "prompt": prompt}
        whole = {"custom_id": custom_id, "method": "POST", "url": planning.TEXT, "body": body}
        return orjson.dumps(whole) + b"\n"

    data = completion("a", "hi") + completion("b", [5, 6]) + completion("c", [99999]) + completion("d", "")
    found = planned(data, planning.TEXT)
    assert found.named("a").prompt_ids == planned.tokenizer().encode_prompts(["hi"])[0]
    assert found.named("b").prompt_ids == [5, 6]
    assert found.named("a").params["max_tokens"] == 16
    assert found.refusals().keys() == {"c", "d"}
    assert "vocabulary" in found.refusals()["c"]["message"]


def test_a_bad_parameter_fails_its_own_line_alone(planned: Planning) -> None:
    bad: dict[str, dict[str, Any]] = {
        "tokens": {"max_tokens": -1},
        "image": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "empty": {"messages": []},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"items": []}}},
        "foo": {"foo": 1},
    }
    data = b"".join(line(name, **body) for name, body in bad.items()) + line("good")
    data += line("half", "@").replace(b'"@"', b'"\\ud83d"')
    data += line("deep", response_format="@").replace(b'"@"', b"[" * 900 + b"]" * 900)
    found = planned(data)
    assert [request.custom_id for request in found.requests] == ["good"]
    assert found.refusals().keys() == {*bad, "half", "deep"}
    for row in found.refused:
        assert row.failed
        assert row.line["error"] is None
        assert row.line["response"]["status_code"] == 400
        error = row.line["response"]["body"]["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"


def test_what_does_not_fit_the_context_is_refused(planned: Planning) -> None:
    data = line("asks", max_tokens=1_000_000) + line("prompt", "x" * 3000) + line("open", max_tokens=None)
    data += line("huge", max_tokens=2**63) + line("minimum", max_tokens=3, min_tokens=4)
    found = planned(data)
    for name in ("asks", "prompt", "huge"):
        assert found.refusals()[name]["code"] == "context_length_exceeded"
    assert found.refusals()["minimum"]["param"] == "min_tokens"
    (request,) = found.requests
    assert request.params["max_tokens"] == 2048 - len(request.prompt_ids)
    assert planned(line(max_tokens=None), default_max_tokens=7).requests[0].params["max_tokens"] == 7


def test_a_context_is_used_to_its_last_token(planned: Planning) -> None:
    length = len(planned(line()).requests[0].prompt_ids)
    found = planned(line("fits", max_tokens=2048 - length) + line("over", max_tokens=2049 - length))
    assert [request.custom_id for request in found.requests] == ["fits"]


def test_a_job_of_bad_requests_only_still_is_a_plan(planned: Planning) -> None:
    found = planned(line("a", max_tokens=0) + line("b", foo=1))
    assert (found.total, found.released, found.requests) == (2, [0], [])
    assert len(found.refused) == 2


@pytest.mark.parametrize("data", [b"", b"\n\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_a_request_is_empty(planned: Planning, data: bytes) -> None:
    assert planned.faults(data) == [(None, "empty_file")]


def test_all_errors_of_a_file_are_found_with_their_line_numbers(planned: Planning) -> None:
    data = b"".join(
        [
            b"\xef\xbb\xbf" + line("a"),
            b"\n",
            b"[1,2]\n",
            b"  \n",
            line("a"),
            line("b", model="other"),
            line("c", stream=True),
            line("d").replace(b"completions", b"x"),
            b'"x"\r\n',
            line("e", body=1),
            line("f", "x" * 5000),
            b"null",
        ]
    )
    assert planned.faults(data, max_line_bytes=4000) == [
        (3, "invalid_json_line"),
        (5, "duplicate_custom_id"),
        (6, "mismatched_model"),
        (7, "streaming_unsupported"),
        (8, "invalid_url"),
        (9, "invalid_json_line"),
        (11, "invalid_json_line"),
        (12, "invalid_json_line"),
    ]


def test_a_duplicate_names_the_line_it_repeats(planned: Planning) -> None:
    with pytest.raises(plan.InvalidInput) as invalid:
        planned(b"\n" + line("a") + line(" a") + line("a"))
    (found,) = invalid.value.errors
    assert (found.line, found.code, found.param) == (4, "duplicate_custom_id", "custom_id")
    assert "line 2" in found.message


def test_a_model_that_is_not_served_is_not_found(planned: Planning) -> None:
    assert planned.faults(line("a", model="nope")) == [(1, "model_not_found")]
    assert planned.faults(line("a") + line("b", model="nope")) == [(2, "mismatched_model")]
    with pytest.raises(plan.InvalidInput) as invalid:
        planned(line("a", model="x" * 100_000) + line("b", model="y" * 100_000))
    assert all(len(found.message) < 400 for found in invalid.value.errors)


def test_the_limit_of_requests_is_exact(planned: Planning) -> None:
    data = [line(f"r{n}") for n in range(4)]
    assert planned.faults(b"".join(data), max_requests_per_job=3) == [(4, "too_many_requests")]
    assert planned(b"".join(data[:3]), max_requests_per_job=3).total == 3


def test_no_more_than_a_thousand_errors_are_kept(planned: Planning) -> None:
    assert len(planned.faults(b"3\n" * 1500)) == 1000


def test_a_batch_holds_few_bytes_however_long_the_lines(
    planned: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "BATCH_BYTES", 1000)
    sizes: list[int] = []
    encode = plan.encode

    def counted(requests: Any, tokenizer: Any) -> list[list[int]]:
        sizes.extend([len(requests)] if requests else [])
        return encode(requests, tokenizer)

    monkeypatch.setattr(plan, "encode", counted)
    found = planned(b"".join(line(f"r{n}", "x" * 400) for n in range(7)))
    assert sizes == [2, 2, 2, 1]
    assert _once(found) == list(range(7))


HARMFUL = """
{%- set said = messages[0].content %}
{%- if said == "memory" %}{{ "x" * 10**10 }}{% endif %}
{%- if said == "time" %}
{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{% endif %}
{%- if said == "error" %}{{ raise_exception("no") }}{% endif %}
{{- said }}"""


def test_of_the_lines_of_a_plan_only_those_that_end_the_rendering_are_refused(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "harmful.jinja"
    path.write_text(HARMFUL)
    renderer = rendering.Renderer(cpu_seconds=0.2)
    monkeypatch.setattr(rendering, "shared", renderer)
    planned = Planning(tmp_path, tokenizer_dir, chat_template=str(path))
    harms = {0: "error", 3: "memory", 255: "time", 300: "time", 301: "memory", 599: "memory"}
    found = planned(b"".join(line(f"r{row}", harms.get(row, f"{row}")) for row in range(600)))
    renderer.close()
    assert {row.row: harms[row.row] for row in found.refused} == harms
    assert [row.row for row in found.refused] == sorted(harms)
    assert _once(found) == list(range(600))
    decode = planned.tokenizer().decode
    assert all(decode(request.prompt_ids) == f"{request.row}" for request in found.requests)


def test_refusals_come_batch_by_batch_before_their_window_is_released(
    planned: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "BATCH", 2)
    wrong: dict[int, dict[str, Any]] = {
        **{row: {"temperature": 99} for row in (0, 4, 7)},
        **{row: {"max_tokens": 9999} for row in (1, 2, 5, 8)},  # known when they are tokenized
    }
    told: list[Any] = []

    class Told(Planned):
        def refuse(self, rows: list[ResultRow]) -> None:
            told.extend(row.row for row in rows)

        def release(self, shards: list[str], planned: int, tokens: int) -> None:
            told.append("released")

    data = b"".join(line(f"r{row}", f"{row}", **wrong.get(row, {})) for row in range(10))
    planned.store.put("input.jsonl", io.BytesIO(data))
    settings = planned.settings(plan_window_requests=6)
    plan.Planner(planning.record(), settings, planned.store, planned.tokenizer, "jobs/j/").plan(
        Told(planned.store)
    )
    assert told == [0, 1, 4, 2, 5, "released", 7, 8, "released"]


def test_a_model_that_cannot_be_loaded_says_so_before_anything_is_released(planned: Planning) -> None:
    planned.store.put("input.jsonl", io.BytesIO(line()))

    def broken(name: str) -> Any:
        raise errors.ModelUnavailable(name=name, source="x", reason="gone")

    sink = Planned(planned.store)
    planner = plan.Planner(planning.record(), planned.settings(), planned.store, broken, "jobs/j/")
    with pytest.raises(errors.ModelUnavailable):
        planner.plan(sink)
    assert sink.total == 0


_FIFTY_THOUSAND = """
import resource, sys
from pathlib import Path
from tests.unit import planning
directory = Path(sys.argv[1])
def data():
    for n in range(50_000):
        yield planning.line(f"r{n}", f"{n % 977} {n} " + "x" * 440)
with open(directory / "in", "wb") as out:
    out.writelines(data())
job = planning.Planning(directory, Path(sys.argv[2]))
with open(directory / "in", "rb") as stream:
    job.store.put("input.jsonl", stream)
class Sink:
    planned = 0
    begin = refuse = lambda *_: None
    def release(self, shards, planned, tokens):
        self.planned += planned
tokenizer = job.tokenizer()
tokenizer.encode_chats(["x"])
before = resource.getrusage(resource.RUSAGE_SELF)
planner = planning.plan.Planner(
    planning.record(), job.settings(), job.store, lambda _: tokenizer, "jobs/j/plan/"
)
sink = Sink()
planner.plan(sink)
after = resource.getrusage(resource.RUSAGE_SELF)
print(sink.planned, before.ru_maxrss // 1024, after.ru_maxrss // 1024, after.ru_utime - before.ru_utime)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fifty_thousand_requests_of_five_hundred_tokens_fit_in_memory(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    command = [sys.executable, "-c", _FIFTY_THOUSAND, str(tmp_path), str(tokenizer_dir)]
    root = Path(plan.__file__).parents[1]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=500)
    planned, before, after, seconds = done.stdout.split()
    print(f"{planned} requests: {before} MB before, {after} MB at most, {float(seconds):.1f} s of CPU")
    assert int(planned) == 50_000
    assert int(after) < 600


FAULTS = {"number": "1e999", "digits": "1" * 5000, "surrogate": '"\\ud800"', "depth": "[" * 199 + "]" * 199}
HOLDERS = {
    planning.CHAT: [
        *("temperature", "max_tokens", "truncate_prompt_tokens", "stop", "tools", "messages", "foo", "user"),
        *("response_format", "chat_template_kwargs", "logit_bias"),
    ],
    planning.TEXT: ["prompt", "max_tokens"],
    planning.EMBED: ["input", "dimensions", "truncate_prompt_tokens"],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("endpoint", HOLDERS)
def test_what_no_request_can_hold_is_refused_by_the_name_of_its_parameter(
    planned: Planning, endpoint: str, fault: str
) -> None:
    lines = [
        f'{{"custom_id":"{name}","method":"POST","url":"{endpoint}",'
        f'"body":{{"model":"m","{name}":{FAULTS[fault]}}}}}\n'
        for name in HOLDERS[endpoint]
    ]
    refusals = planned("".join(lines).encode(), endpoint).refusals()
    assert {name: error["param"] for name, error in refusals.items()} == {
        name: name for name in HOLDERS[endpoint]
    }
    assert all("cannot be run" in error["message"] for error in refusals.values())


def test_an_archive_is_never_unpacked_and_fails_its_job_by_its_first_line(planned: Planning) -> None:
    lines = b"".join(line(f"r{row}") for row in range(1000))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("in.jsonl", lines)
    for data in (gzip.compress(lines), archive.getvalue(), gzip.compress(bytes(50_000_000))):
        assert planned.faults(data, max_line_bytes=100_000)[0][1] == "invalid_json_line"
