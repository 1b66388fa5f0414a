import orjson

from jobs import records, views
from jobs.records import Manifest, ResultRow
from tests.unit import planning

MANIFEST = Manifest("j", "completed", "m", {}, total=2, completed=2, failed=0, usage=(6, 4, 5, 3), files={})


def test_what_is_written_down_is_read_back() -> None:
    row = ResultRow(1, False, {"id": "x"}, None, (3, 2, 5, 1))
    assert ResultRow.from_json(row.to_json()) == row
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_a_manifest_of_an_earlier_version_counts_no_reasoning() -> None:
    old = orjson.dumps(orjson.loads(MANIFEST.to_json()) | {"usage": [6, 4, 5]})
    assert Manifest.from_json(old).usage == (6, 4, 5, 0)


def test_usages_add_up_number_by_number() -> None:
    assert records.added((1, 2, 3, 4), (10, 20, 30, 40)) == (11, 22, 33, 44)


def test_an_ended_batch_shows_its_reasoning_tokens() -> None:
    usage = views.batch(planning.record(), None, MANIFEST, cancelled=False).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (6, 5, 11)
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == 3


def test_an_ended_batch_tells_how_fast_it_was_if_its_manifest_does() -> None:
    old = orjson.loads(MANIFEST.to_json())
    del old["running_seconds"], old["tokens_per_second"]
    batch = views.batch(planning.record(), None, Manifest.from_json(orjson.dumps(old)), cancelled=False)
    assert (batch.running_seconds, batch.tokens_per_second) == (None, None)
    new = Manifest(**(old | {"running_seconds": 2.5, "tokens_per_second": 4.0}))
    batch = views.batch(planning.record(), None, new, cancelled=False)
    assert (batch.running_seconds, batch.tokens_per_second) == (2.5, 4.0)
