import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api import errors as shapes
from api import page

FOLDER = Path(page.__file__).parent
MOST_BYTES = 200_000


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    shapes.install(app)
    app.include_router(page.router)
    return TestClient(app)


def test_all_of_the_page_together_stays_light() -> None:
    total = sum(len(asset.data) for asset in page.ASSETS.values())
    print(f"the page weighs {total:,} bytes")
    assert total < MOST_BYTES


def test_the_policy_lets_nothing_in_from_elsewhere_and_nothing_inline(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "default-src 'none'" in policy
    for name, asset in page.ASSETS.items():
        text = asset.data.decode()
        assert not re.search(r"\son[a-z]+=|<style|style=|innerHTML|insertAdjacentHTML|eval\(", text), name
        assert not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)", text.replace("http://127.0.0.1:8000", "")
        ), name


def test_every_file_that_is_named_is_served(client: TestClient) -> None:
    index = page.ASSETS["index.html"].data.decode()
    named = set(re.findall(r'"page/([a-z.]+)"', index))
    for asset in page.ASSETS.values():
        named |= set(re.findall(r'from "\./([a-z.]+)"', asset.data.decode()))
    assert named == page.ASSETS.keys() - {"index.html"}
    for name in named:
        answer = client.get(f"/page/{name}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_is_known_is_not_sent_again(client: TestClient) -> None:
    etag = client.get("/page/main.js").headers["etag"]
    answer = client.get("/page/main.js", headers={"If-None-Match": etag})
    assert (answer.status_code, answer.content) == (304, b"")


@pytest.mark.parametrize("name", ["nope.js", "__init__.py", "..%2f__init__.py", "%2e%2e%2fapp.py"])
def test_what_is_no_file_of_the_page_is_not_found(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404
