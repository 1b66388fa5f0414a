"""The file that a run without servers reads: which model and endpoint it is for."""

import hashlib
from pathlib import Path
from typing import Any

from jobs import bodies, lines
from jobs.settings import Settings

MODEL_NAME = "model"


def first_model(source: Path, settings: Settings) -> str:
    """Return the model that the first line names; the plan reports a line that names none."""
    body = _first_line(source, settings).get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) and model else MODEL_NAME


def first_url(source: Path, settings: Settings) -> str:
    """Return the endpoint that the first line names, chat completions if it names none that we run."""
    url = _first_line(source, settings).get("url")
    return url if isinstance(url, str) and url in bodies.BODIES else next(iter(bodies.BODIES))


def _first_line(source: Path, settings: Settings) -> dict[str, Any]:
    with source.open("rb") as stream:
        for line in lines.read(stream, settings.max_line_bytes):
            try:
                value = lines.parse(line.data or b"").value
            except ValueError:
                break
            return value if isinstance(value, dict) else {}
    return {}


def sha256(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
