"""An API on a real Redis and a local store."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jobs import keys, store
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.integration.api import serving


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> Settings:
    """Settings of an empty system that serves one model."""
    return Settings(
        redis_url=redis_url,
        store_url=f"file://{tmp_path}/store",
        models={serving.MODEL: ModelSettings(source="none", engine="echo")},
        scratch_dir=tmp_path,
        max_file_bytes=1_000_000,
        max_inline_bytes=100_000,
        max_requests_per_job=50,
        reap_seconds=0.1,
    )


@pytest.fixture
def serve(settings: Settings) -> Iterator[Callable[..., serving.Api]]:
    """Start the API with these settings changed."""
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(serving.serve(changed(settings, **changes)))


@pytest.fixture
def api(serve: Callable[..., serving.Api]) -> serving.Api:
    """A running API with no keys."""
    return serve()


def keyed(settings: Settings, *tenants: str) -> list[dict[str, str]]:
    """Make a key for each tenant; return the headers they send."""
    objects = store.open_store(settings)
    return [{"Authorization": f"Bearer {keys.create(objects, tenant)[1]}"} for tenant in tenants]


def changed(settings: Settings, **changes: Any) -> Settings:
    """Return the settings with some changed."""
    return Settings(**(settings.model_dump() | changes))
