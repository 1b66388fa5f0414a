"""The body of a create: what is accepted, and that a refusal names the parameter."""

from typing import Any

import pytest

from jobs import bodies, creation, errors

GOOD: dict[str, Any] = {
    "input_file_id": "file-01",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


def refused(**changes: Any) -> errors.InvalidRequest:
    with pytest.raises(errors.InvalidRequest) as caught:
        creation.parse(GOOD | changes)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", ["endpoint", "completion_window"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        creation.parse({key: value for key, value in GOOD.items() if key != name})
    assert (caught.value.param, caught.value.code) == (name, "missing_required_parameter")


def test_neither_or_both_inputs_are_refused() -> None:
    assert refused(input_file_id=None).code == "missing_required_parameter"
    assert refused(requests=[{}]).param == "input_file_id"
    assert refused(input_file_id=None, requests=[]).param == "requests"
    assert refused(input_file_id=None, requests=[1]).param == "requests.0"


def test_an_unknown_field_is_refused_by_name() -> None:
    error = refused(colour="red")
    assert (error.param, error.code) == ("colour", "unknown_parameter")
    assert refused(output_expires_after={"anchor": "created_at", "seconds": 3600, "x": 1}).param == (
        "output_expires_after.x"
    )


@pytest.mark.parametrize("body", [None, [], "x", 3, True])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="JSON object"):
        creation.parse(body)


@pytest.mark.parametrize("metadata", [None, {}, {"k": "v"}, {"k" * 64: "€" * 512}, {"": ""}])
def test_metadata_within_the_rules_is_kept(metadata: dict[str, str] | None) -> None:
    assert creation.parse(GOOD | {"metadata": metadata}).metadata == metadata


@pytest.mark.parametrize(
    "metadata",
    ["x", {"k": 1}, {"k": None}, {str(n): "" for n in range(17)}, {"k" * 65: ""}, {"k": "€" * 513}, [], 1],
)
def test_metadata_outside_the_rules_is_refused(metadata: Any) -> None:
    assert refused(metadata=metadata).param == "metadata"


@pytest.mark.parametrize(
    ("window", "seconds"), [("24h", 86_400), ("90m", 5400), ("7d", 604_800), ("365d", 31_536_000)]
)
def test_windows(window: str, seconds: int) -> None:
    assert creation.window_seconds(window) == seconds


@pytest.mark.parametrize(
    "window", ["", "24", "h", "0h", "-1h", "1.5h", "24H", " 24h", "24h\n", "1w", "366d", "9" * 30 + "h", "٣h"]
)
def test_other_windows_are_refused(window: str) -> None:
    assert refused(completion_window=window).param == "completion_window"


@pytest.mark.parametrize("endpoint", ["/v1/responses", "/v1/chat/completions/", "chat", "", 1, None])
def test_endpoints_not_served_are_refused(endpoint: Any) -> None:
    assert refused(endpoint=endpoint).param == "endpoint"


@pytest.mark.parametrize("endpoint", bodies.BODIES)
def test_each_endpoint_with_a_body_is_served(endpoint: str) -> None:
    assert creation.parse(GOOD | {"endpoint": endpoint}).endpoint == endpoint


@pytest.mark.parametrize("priority", [-101, 101, "1", 1.5, True])
def test_priority_outside_its_range_is_refused(priority: Any) -> None:
    assert refused(priority=priority).param == "priority"


@pytest.mark.parametrize("seconds", [3599, 2_592_001, "3600", 3600.5])
def test_output_expiry_outside_its_range_is_refused(seconds: Any) -> None:
    error = refused(output_expires_after={"anchor": "created_at", "seconds": seconds})
    assert error.param == "output_expires_after.seconds"
    assert refused(output_expires_after={"anchor": "now", "seconds": 3600}).param == (
        "output_expires_after.anchor"
    )
