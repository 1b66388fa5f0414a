"""Put finished shards in the place of old ones, so that a crash leaves what the next run repairs.

`.NAME.new` holds shards that are being written, and is thrown away after a crash. `.NAME.ready` holds
finished ones and a list of them: from then on they are the dataset, and whoever comes next moves the rest.
"""

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import orjson

SUFFIXES = ("parquet", "jsonl")
_LIST = "shards.json"


@dataclass(frozen=True)
class File:
    """A file of a dataset. bytes: its size. sha256: of its bytes, in hexadecimal."""

    name: str
    rows: int
    bytes: int
    sha256: str


def staging(directory: Path, name: str) -> Path:
    """Return an empty hidden directory for new shards, after repairing what a crash has left."""
    directory.mkdir(parents=True, exist_ok=True)
    repair(directory, name)
    place = directory / f".{name}.new"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place


def publish(place: Path, directory: Path, name: str, files: list[str]) -> list[Path]:
    """Replace the shards of a name by those in `place`; return their paths.

    Readers may find fewer shards than there are for a moment, but never a part of one, nor old beside new.
    """
    (place / _LIST).write_bytes(orjson.dumps(files))
    for path in place.iterdir():
        _sync(path)
    _sync(place)
    os.rename(place, directory / f".{name}.ready")
    _sync(directory)
    repair(directory, name)
    return [directory / file for file in files]


def repair(directory: Path, name: str = "data") -> None:
    """Finish what a crash has interrupted in `publish`. Without such a crash, do nothing."""
    ready = directory / f".{name}.ready"
    if not ready.exists():
        return
    listed = ready / _LIST
    # The list goes last: without it every shard has been moved.
    files = orjson.loads(listed.read_bytes()) if listed.exists() else []
    waiting = [file for file in files if (ready / file).exists()]
    if listed.exists():
        _remove_old(directory, name, keep=set(files) - set(waiting))
    for file in waiting:
        os.replace(ready / file, directory / file)
    _sync(directory)
    shutil.rmtree(ready)


def present(directory: Path, name: str = "data") -> list[Path]:
    """Return the shards of a name that are there, of any format, in order."""
    pattern = re.compile(rf"{re.escape(name)}(-\d{{5,}})?\.({'|'.join(SUFFIXES)})")
    return sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))


def described(path: Path, rows: int) -> File:
    """Return what a dataset card says of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return File(path.name, rows, path.stat().st_size, digest)


def _remove_old(directory: Path, name: str, keep: set[str]) -> None:
    for path in present(directory, name):
        if path.name not in keep:
            path.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
