import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import errors, finalize, results
from jobs.records import FileRecord, Manifest, PartEntry, ResultRow
from jobs.settings import Settings
from jobs.store_local import LocalStore
from tests.unit import planning

JOB = planning.record()
TIMES = {"created_at": 1000.0, "completed_at": 1100.0}


def _row(row: int, failed: bool = False, text: str = "t") -> ResultRow:
    name = f"r{row}"
    if failed:
        return results.refused(JOB.id, row, name, errors.ParameterRefused(text, param="n"))
    body = {"choices": [{"text": text}]}
    metrics = {
        "custom_id": name,
        "queue_seconds": 1.0,
        "ttft_seconds": None,
        "inter_token_seconds": None,
        "e2e_seconds": 2.0,
        "started_at": 1001.0,
        "finished_at": 1002.0,
        "attempts": 0,
        "worker": "w1",
        "deduplicated_from": None,
    }
    return ResultRow(row, False, results.line(f"{JOB.id}:{row}", name, 200, body), metrics, (3, 1, 2, 1))


class Finishing:
    """Merges parts in a directory of its own."""

    def __init__(self, directory: Path, **changed: Any) -> None:
        self.store = LocalStore(directory / "store")
        self.settings = Settings(scratch_dir=directory, **changed)

    def part(self, *rows: ResultRow, skip: tuple[int, ...] = ()) -> PartEntry:
        part = results.Part(JOB.id)
        part.add(rows)
        part.write(self.store)
        return PartEntry(part.name, list(skip))

    def input(self, *lines: bytes) -> None:
        self.store.put("input.jsonl", io.BytesIO(b"".join(lines)))

    def merge(self, parts: list[PartEntry], total: int | None, state: str = "completed") -> Manifest:
        merge = finalize.Merge(JOB, state, self.store, self.settings, f"jobs/{JOB.id}/out/1/")
        return merge.run(parts, total, "m", TIMES)

    def lines(self, manifest: Manifest, kind: str) -> list[dict[str, Any]]:
        if kind not in manifest.files:
            return []
        data = self.store.get(manifest.files[kind]["key"])
        assert len(data) == manifest.files[kind]["bytes"]
        return [orjson.loads(line) for line in data.splitlines()]

    def names(self, manifest: Manifest, kind: str) -> list[str]:
        return [line["custom_id"] for line in self.lines(manifest, kind)]


@pytest.fixture
def finishing(tmp_path: Path) -> Finishing:
    return Finishing(tmp_path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_overlapping_parts_give_each_row_once_in_input_order(
    finishing: Finishing, data: st.DataObject
) -> None:
    total = data.draw(st.integers(1, 12))
    failed = data.draw(st.sets(st.integers(0, total - 1)))
    order = data.draw(st.permutations(range(total)))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    parts, seen = [], set()
    for start, end in zip([0, *cuts], [*cuts, total], strict=True):
        doubled = data.draw(st.sets(st.sampled_from(sorted(seen)))) if seen else set()
        skipped = data.draw(st.sets(st.sampled_from(sorted(doubled)))) if doubled else set()
        own = order[start:end]
        rows = [_row(row, row in failed) for row in own] + [_row(row, text="late") for row in doubled]
        parts.append(finishing.part(*rows, skip=tuple(skipped)))
        seen.update(own)
    manifest = finishing.merge(parts, total)
    assert finishing.names(manifest, "output") == [f"r{row}" for row in range(total) if row not in failed]
    assert finishing.names(manifest, "errors") == [f"r{row}" for row in sorted(failed)]
    assert finishing.names(manifest, "metrics") == finishing.names(manifest, "output")
    assert b"late" not in b"".join(orjson.dumps(line) for line in finishing.lines(manifest, "output"))
    assert (manifest.total, manifest.completed, manifest.failed) == (total, total - len(failed), len(failed))
    assert manifest.usage == (
        3 * manifest.completed,
        manifest.completed,
        2 * manifest.completed,
        manifest.completed,
    )


def test_a_skipped_row_counts_from_the_part_that_was_accepted(finishing: Finishing) -> None:
    zombie = finishing.part(_row(0, text="late"), _row(1), skip=(0,))
    manifest = finishing.merge([zombie, finishing.part(_row(0, text="right"))], 2)
    texts = [line["response"]["body"]["choices"][0]["text"] for line in finishing.lines(manifest, "output")]
    assert texts == ["right", "t"]


def test_a_failed_request_is_not_counted_as_completed(finishing: Finishing) -> None:
    manifest = finishing.merge([finishing.part(_row(0), _row(1, failed=True))], 2)
    assert (manifest.total, manifest.completed, manifest.failed) == (2, 1, 1)


def test_a_job_of_failures_has_an_error_file_and_no_output(finishing: Finishing) -> None:
    manifest = finishing.merge([finishing.part(_row(0, failed=True))], 1)
    assert manifest.state == "completed"
    assert manifest.files.keys() == {"errors", "summary"}
    (line,) = finishing.lines(manifest, "errors")
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["param"] == "n"


def test_a_job_without_errors_has_no_error_file(finishing: Finishing) -> None:
    manifest = finishing.merge([finishing.part(_row(0))], 1)
    assert manifest.files.keys() == {"output", "metrics", "summary"}


def test_a_missing_row_is_never_completed(finishing: Finishing) -> None:
    with pytest.raises(finalize.RowsMissing, match="1 of 2"):
        finishing.merge([finishing.part(_row(0))], 2)
    assert not list(finishing.store.list(f"jobs/{JOB.id}/out/"))


def test_a_missing_part_is_never_completed(finishing: Finishing) -> None:
    with pytest.raises(errors.NotFound):
        finishing.merge([finishing.part(_row(0)), PartEntry("gone")], 1)


@pytest.mark.parametrize(("state", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
def test_what_never_ran_gets_a_line_and_is_not_failed(finishing: Finishing, state: str, code: str) -> None:
    finishing.input(*(planning.line(f"r{row}") + b"\n" for row in range(5)))
    done = finishing.part(_row(1), _row(3, failed=True))
    manifest = finishing.merge([done], 5, state)
    assert finishing.names(manifest, "output") == ["r1"]
    assert finishing.names(manifest, "errors") == ["r0", "r2", "r3", "r4"]
    never = [line for line in finishing.lines(manifest, "errors") if line["response"] is None]
    assert [line["error"]["code"] for line in never] == [code] * 3
    assert (manifest.total, manifest.completed, manifest.failed) == (5, 1, 1)
    read = [PartEntry(**entry) for entry in manifest.parts]
    rows = [row.row for entry in read for row in results.read_part(finishing.store, JOB.id, entry)]
    assert sorted(rows) == list(range(5))


def test_what_never_ran_is_written_in_parts_of_bounded_size(tmp_path: Path) -> None:
    finishing = Finishing(tmp_path, flush_bytes=1000)
    finishing.input(*(planning.line(f"r{row}") for row in range(20)))
    manifest = finishing.merge([], 20, "cancelled")
    assert len(manifest.parts) > 3
    assert finishing.names(manifest, "errors") == [f"r{row}" for row in range(20)]


def test_a_job_cancelled_before_it_was_checked_answers_the_lines_that_have_an_id(
    finishing: Finishing,
) -> None:
    good = planning.line
    finishing.input(good("a"), b"\n[1]\n", good("a"), b"{\n", good("b"))
    manifest = finishing.merge([], None, "cancelled")
    assert finishing.names(manifest, "errors") == ["a", "b"]
    assert (manifest.total, manifest.completed, manifest.failed) == (5, 0, 0)


def test_custom_ids_stay_byte_for_byte(finishing: Finishing) -> None:
    names = [" a ", "a", "\0", "\u2028", "\N{SNOWMAN}"]
    finishing.input(*(planning.line(name) for name in names))
    assert finishing.names(finishing.merge([], 5, "expired"), "errors") == names


def test_no_scratch_is_left(finishing: Finishing, tmp_path: Path) -> None:
    finishing.merge([finishing.part(_row(0))], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_file_is_visible_only_when_all_are_written(
    finishing: Finishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = finishing.part(_row(0), _row(1, failed=True))

    def broken(*_: object) -> None:
        raise errors.StoreUnreachable(url="x", reason="full")

    monkeypatch.setattr(finalize.Summary, "build", broken)
    with pytest.raises(errors.StoreUnreachable):
        finishing.merge([part], 2)
    assert not list(finishing.store.list(f"jobs/{JOB.id}/out/"))


def test_the_first_manifest_counts(finishing: Finishing) -> None:
    first = finishing.merge([finishing.part(_row(0))], 1)
    late = finishing.merge([finishing.part(_row(0, failed=True))], 1)
    assert finalize.publish(finishing.store, JOB, first) == first
    assert finalize.publish(finishing.store, JOB, late).files == first.files
    stored = Manifest.from_json(finishing.store.get(finalize.manifest_key(JOB.id)))
    assert stored.files == first.files
    for kind, made in first.files.items():
        data = finishing.store.get(f"file-records/tenant/{made['id']}.json")
        file = FileRecord.from_json(data)
        assert (file.bytes, file.key) == (made["bytes"], made["key"])
        assert file.purpose == "batch_output"
        assert file.filename == f"{JOB.id}_{kind}.{'json' if kind == 'summary' else 'jsonl'}"
        assert (file.created_at, file.expires_at) == (1100, None)


def test_the_same_parts_give_the_same_bytes(finishing: Finishing) -> None:
    parts = [finishing.part(*(_row(row, row % 3 == 0) for row in range(9)))]
    kinds = ("output", "errors", "metrics", "summary")
    first, second = (
        {kind: finishing.store.get(finishing.merge(parts, 9).files[kind]["key"]) for kind in kinds}
        for _ in range(2)
    )
    assert first == second


def test_the_manifest_has_the_speed_of_the_summary(finishing: Finishing) -> None:
    manifest = finishing.merge([finishing.part(_row(0), _row(1))], 2)
    summary = orjson.loads(finishing.store.get(manifest.files["summary"]["key"]))
    assert summary["running_seconds"] is not None
    assert manifest.running_seconds == summary["running_seconds"]
    assert manifest.tokens_per_second == summary["tokens_per_second"]
