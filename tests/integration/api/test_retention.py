"""Deleting a batch, and what is answered when results or an input have expired."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import orjson
import pytest
from click.testing import CliRunner

from jobs import cli, deletion, errors, ids, results
from jobs.records import JobRecord
from jobs.settings import Settings
from jobs.store_faults import FailAfter, FaultyStore
from jobs.sweep import DAY, HOUR, Sweep
from tests.integration.api.serving import Api, Hand, line, until
from tests.integration.system.system import environment

Serve = Callable[..., Api]


@pytest.fixture
def api(serve: Serve) -> Api:
    """An API that does not recover jobs: a recovery at the moment of a deletion leaves work to the sweep."""
    return serve(reap_seconds=600)


def ended(api: Api, **fields: object) -> str:
    """Return the id of a batch that completed with an output line and an error line."""
    job_id = api.create("a", "b", **fields)
    finish(api, job_id)
    return job_id


def finish(api: Api, job_id: str) -> None:
    hand = Hand(api.context, job_id, 2)
    hand.begin()
    hand.part((0, "a", False), (1, "b", True))
    hand.end()
    hand.finish()


def stored(api: Api) -> set[str]:
    return {found.key for found in api.context.store.list("")}


def status(api: Api, path: str) -> int:
    return api.http.get(path).status_code


def test_a_deleted_batch_leaves_its_input_and_nothing_else(api: Api) -> None:
    file_id = api.upload("a", "b")
    before = stored(api)
    job_id = ended(api, input_file_id=file_id, output_expires_after={"anchor": "created_at", "seconds": 3600})
    batch = api.client.batches.retrieve(job_id)
    answer = api.http.delete(f"/v1/batches/{job_id}")
    assert (answer.status_code, answer.json()) == (200, {"id": job_id, "object": "batch", "deleted": True})
    extra = {key for key in stored(api) - before if "/default/file-" not in key and "files/" not in key}
    assert extra == {f"deleted/{job_id}"}
    for path in ("", "/results", "/metrics"):
        assert status(api, f"/v1/batches/{job_id}{path}") == 404
    assert status(api, f"/v1/files/{batch.output_file_id}/content") == 404
    assert status(api, f"/v1/files/{batch.error_file_id}") == 404
    assert status(api, f"/v1/files/{file_id}/content") == 200
    assert [item.id for item in api.client.batches.list()] == []
    assert api.http.delete(f"/v1/batches/{job_id}").status_code == 404
    assert api.http.post(f"/v1/batches/{job_id}/cancel").status_code == 404


def test_a_batch_that_has_not_ended_is_not_deleted(api: Api) -> None:
    job_id = api.create("a", "b")
    before = stored(api)
    answer = api.http.delete(f"/v1/batches/{job_id}")
    assert answer.status_code == 409
    assert "validating cannot be deleted: cancel it first" in answer.json()["error"]["message"]
    Hand(api.context, job_id, 2).begin()
    assert api.http.delete(f"/v1/batches/{job_id}").status_code == 409
    assert stored(api) == before
    api.http.post(f"/v1/batches/{job_id}/cancel")
    assert api.http.delete(f"/v1/batches/{job_id}").status_code == 409
    Hand(api.context, job_id, 2).finish()
    assert api.http.delete(f"/v1/batches/{job_id}").status_code == 200


def test_a_failed_batch_is_deleted(api: Api) -> None:
    job_id = api.create("a")
    Hand(api.context, job_id, 1).fail("invalid_json_line", 1)
    assert api.http.delete(f"/v1/batches/{job_id}").status_code == 200
    assert status(api, f"/v1/batches/{job_id}") == 404


def test_the_batch_of_another_tenant_is_as_unknown_as_none(api: Api) -> None:
    job_id, before = ended(api), None
    for name in (job_id, ids.batch_id(), "batch_x", "file-" + job_id[6:]):
        before = stored(api)
        with pytest.raises(errors.NotFound) as caught:
            api.context.batches.delete("other", name)
        assert str(caught.value).replace(name, "ID") == "No such batch: 'ID'."
        assert stored(api) == before
    assert status(api, f"/v1/batches/{job_id}") == 200
    deletion.begin(api.context.store, api.context.batches.record("default", job_id))
    with pytest.raises(errors.NotFound):  # nor may another tenant finish a deletion that broke off
        api.context.batches.delete("other", job_id)
    assert status(api, f"/v1/batches/{job_id}") == 200


@pytest.mark.parametrize("forgotten", [False, True])
def test_another_process_that_knew_the_batch_answers_404_too(serve: Serve, forgotten: bool) -> None:
    one, other = serve(), serve()
    job_id = ended(one)
    for path in ("", "/results", "/metrics"):
        assert status(other, f"/v1/batches/{job_id}{path}") == 200
    if forgotten:
        one.context.ledger.redis.flushall()
    assert one.http.delete(f"/v1/batches/{job_id}").status_code == 200
    for path in ("", "/results", "/metrics"):
        assert status(other, f"/v1/batches/{job_id}{path}") == 404
    assert other.http.delete(f"/v1/batches/{job_id}").status_code == 404


def test_the_idempotency_key_of_a_deleted_batch_makes_a_new_one(api: Api) -> None:
    body = {
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "requests": [line("a"), line("b")],
    }

    def create(**changes: str) -> str:
        answer = api.http.post("/v1/batches", json=body | changes, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 200
        return str(answer.json()["id"])

    first = create()
    finish(api, first)
    api.http.delete(f"/v1/batches/{first}")
    second = create(completion_window="25h")
    assert second != first
    # The sweep, which deletes the first one again, does not take the key from the second.
    Sweep(api.context.store, api.context.settings.scratch_dir).run()
    assert create(completion_window="25h") == second


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_create_that_found_the_key_of_a_batch_deleted_meanwhile_makes_no_half_of_it(
    serve: Serve, forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = serve(reap_seconds=600), serve(reap_seconds=600)
    body = {
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "requests": [line("a"), line("b")],
    }

    def create() -> httpx.Response:
        return other.http.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"})

    first = create().json()["id"]
    finish(one, first)
    if forgotten:
        one.context.ledger.redis.flushall()
    find = other.context.batches.find

    def found_and_then_deleted(job_id: str) -> JobRecord | None:
        record = find(job_id)
        if record is not None:
            one.context.batches.delete("default", first)
        return record

    with monkeypatch.context() as patch:
        patch.setattr(other.context.batches, "find", found_and_then_deleted)
        answer = create()
    assert answer.status_code == 503
    assert {key for key in stored(one) if first[6:] in key and "_input" not in key} == {f"deleted/{first}"}
    assert create().json()["id"] != first


@pytest.mark.parametrize("steps", range(0, 16, 3))
@pytest.mark.parametrize("by_sweep", [False, True])
def test_a_deletion_that_broke_off_is_finished_by_a_repeat_or_by_the_sweep(
    api: Api, steps: int, by_sweep: bool, tmp_path: Path
) -> None:
    before = stored(api)
    job_id = ended(api, output_expires_after={"anchor": "created_at", "seconds": 3600})
    record = api.context.batches.record("default", job_id)
    store = api.context.store
    deletion.begin(store, record)
    with pytest.raises(errors.StoreUnreachable):
        deletion.purge(FaultyStore(store, {"delete": FailAfter(steps)}), record)
    if by_sweep:
        Sweep(store, tmp_path).run()
    else:
        assert api.http.delete(f"/v1/batches/{job_id}").status_code == 200
    assert api.http.delete(f"/v1/batches/{job_id}").status_code == 404
    file = record.input_file_id
    left = {f"files/{file}", f"file-records/default/{file}.json", f"deleted/{job_id}"}
    assert stored(api) - before == left
    Sweep(store, tmp_path, clock=lambda: time.time() + 1.1 * DAY).run()
    assert stored(api) - before == left - {f"deleted/{job_id}"}


def test_jobs_are_recovered_though_one_that_was_deleted_is_still_marked_open(serve: Serve) -> None:
    api = serve()
    store = api.context.store
    store.put(f"open/{ids.batch_id()}", b"")
    job_id = api.create("a", "b")
    api.context.ledger.redis.flushall()
    until(lambda: api.context.ledger.job(job_id) is not None)


def test_results_that_expired_answer_404_and_the_batch_is_still_shown(serve: Serve, tmp_path: Path) -> None:
    job_id = serve().create("a", "b", output_expires_after={"anchor": "created_at", "seconds": 3600})
    api = serve()
    store = api.context.store
    record = JobRecord.from_json(store.get(f"jobs/{job_id}/job.json"))
    store.put(f"jobs/{job_id}/job.json", replace(record, output_expires_seconds=2).to_json())
    finish(api, job_id)
    batch = api.client.batches.retrieve(job_id)
    paths = [f"/v1/files/{batch.output_file_id}/content", f"/v1/files/{batch.error_file_id}"]
    assert status(api, f"/v1/batches/{job_id}/results") == 200
    until(lambda: status(api, paths[0]) == 404)
    for sweep in (False, True):
        if sweep:
            removed = Sweep(store, tmp_path, clock=lambda: time.time() + 1.1 * HOUR).run().objects
            assert removed == {"expired files": 4, "expired results": 5, "markers": 4}
            assert results.list_parts(store, job_id) == []
        assert api.client.batches.retrieve(job_id) == batch
        assert [item.id for item in api.client.batches.list()] == [job_id]
        assert [status(api, path) for path in paths] == [404, 404]
        answer = api.http.get(f"/v1/batches/{job_id}/results")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "results_expired")
        metrics = api.http.get(f"/v1/batches/{job_id}/metrics")
        assert metrics.json()["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert api.http.delete(f"/v1/batches/{job_id}").status_code == 200


def test_the_api_sweeps_by_itself(serve: Serve) -> None:
    api = serve(sweep_seconds=0.2)
    job_id = ended(api)
    deletion.begin(api.context.store, api.context.batches.record("default", job_id))
    until(lambda: f"jobs/{job_id}/job.json" not in stored(api))


def test_the_command_line_deletes_and_sweeps(
    api: Api, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, running = ended(api), api.create("a")
    record = api.context.batches.record("default", other := ended(api))
    deletion.begin(api.context.store, record)
    monkeypatch.setenv("LONGHAUL_API_URL", api.url)
    runner = CliRunner()
    assert runner.invoke(cli.main, ["delete", job_id]).stdout == f"{job_id} deleted\n"
    again = runner.invoke(cli.main, ["delete", job_id])
    assert again.exit_code == 1
    assert "No such batch" in again.stderr
    refused = runner.invoke(cli.main, ["delete", running])
    assert refused.exit_code == 1
    assert "cancel it first" in refused.stderr
    monkeypatch.delenv("LONGHAUL_API_URL")
    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)
    foreseen = runner.invoke(cli.main, ["sweep", "--dry-run", "--json"])
    assert foreseen.exit_code == 0, foreseen.stderr
    facts = orjson.loads(foreseen.stdout)
    assert facts["kind"] == "deleted jobs"
    assert f"jobs/{other}/job.json" in stored(api)
    done = runner.invoke(cli.main, ["sweep"])
    assert f"{facts['objects']} objects, {facts['bytes']:,} bytes" in done.stderr
    assert done.stdout.split() == [str(facts["objects"]), f"{facts['bytes']:,}", "B", "deleted", "jobs"]
    assert runner.invoke(cli.main, ["sweep"]).stdout == ""
    assert f"jobs/{other}/job.json" not in stored(api)
