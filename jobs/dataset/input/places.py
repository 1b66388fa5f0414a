"""Which files an input is: a file, a directory, a glob, in a bucket or not, a saved Hugging Face dataset."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any

import orjson
from pyarrow import fs

from jobs.dataset.input import buckets, input_errors

KINDS = {
    ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "tsv",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"}
_METADATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_SHARD = re.compile(r"data-\d{5}\.")
_ASIDE = ("errors.", "invalid.", "summary.")
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class File:
    """A file of the input. `shown` is its name in messages; `codec` what it is compressed with."""

    filesystem: Any
    path: str
    shown: str
    kind: str
    codec: str | None
    size: int
    mtime_ns: int


def find(place: str, outputs: Sequence[Path] = ()) -> list[File]:
    """Return the files of a place in natural order of their names, all of one kind.

    A directory is searched to the bottom; hidden files, those with a suffix that is not known, and those in
    the directories `outputs` are left out. Raises InputMissing, InputEmpty, InputIsOutput, InputMixed,
    InputUnknown, SplitMissing.
    """
    filesystem, path, scheme = buckets.opened(place)
    info = _info(filesystem, path, place)
    if info.type == fs.FileType.File:
        return _others([_named(filesystem, info, scheme)], place, outputs)
    if info.type == fs.FileType.Directory:
        saved = _saved(filesystem, path, place, scheme)
        if saved is not None:
            return saved
        return _one_kind(_others(_below(filesystem, path, path, scheme), place, outputs), place)
    if _MAGIC.search(path):
        return _one_kind(_others(_matching(filesystem, path, scheme), place, outputs), place)
    raise input_errors.InputMissing(place=place)


def _others(files: list[File], place: str, outputs: Sequence[Path]) -> list[File]:
    """Return the files that are in none of these directories; raises InputIsOutput if that leaves none."""
    tops = [str(directory.resolve()) + os.sep for directory in outputs]
    kept = [file for file in files if not _real(file).startswith(tuple(tops))]
    if files and not kept:
        raise input_errors.InputIsOutput(place=place)
    return kept


def _real(file: File) -> str:
    return os.path.realpath(file.path) if isinstance(file.filesystem, fs.LocalFileSystem) else file.shown


def check_same(file: File) -> None:
    """Raise InputChanged if a file is no longer the one that was found."""
    info = _info(file.filesystem, file.path, file.shown)
    if (info.size, info.mtime_ns or 0) != (file.size, file.mtime_ns):
        raise input_errors.InputChanged(where=file.shown, reason="it has another size or time now")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts part-2 before part-10."""
    return [
        (0, int(part), part) if part.isdigit() else (1, 0, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", name)
    ]


def kind_of(path: str) -> tuple[str, str | None] | None:
    """Return what a file is by its suffixes, and what it is compressed with; None: not known."""
    stem, suffix = os.path.splitext(path.lower())
    codec = CODECS.get(suffix)
    if codec is not None:
        suffix = os.path.splitext(stem)[1]
    kind = KINDS.get(suffix)
    if kind is None or (codec and kind in ("parquet", "arrow")):
        return None
    return kind, codec


def _info(filesystem: Any, path: str, place: str) -> Any:
    try:
        return filesystem.get_file_info(path)
    except OSError as error:
        raise input_errors.InputUnreadable(where=place, reason=error) from None


def _named(filesystem: Any, info: Any, scheme: str) -> File:
    known = kind_of(info.path)
    if known is None:
        names, codecs = ", ".join(KINDS), ", ".join(CODECS)
        raise input_errors.InputUnknown(place=scheme + info.path, known=names, codecs=codecs)
    return File(filesystem, info.path, scheme + info.path, *known, info.size, info.mtime_ns or 0)


def _below(filesystem: Any, base: str, top: str, scheme: str) -> list[File]:
    """Return the files of known kinds in a directory and in those below it."""
    infos = _listed(filesystem, base, scheme)
    visible = [info for info in infos if not _hidden(info.path[len(top) :])]
    ours = {os.path.dirname(info.path) for info in visible if _SHARD.match(info.base_name)}
    return [
        _named(filesystem, info, scheme)
        for info in visible
        if kind_of(info.path)
        and info.base_name not in _METADATA
        and not (os.path.dirname(info.path) in ours and info.base_name.startswith(_ASIDE))
    ]


def _listed(filesystem: Any, base: str, scheme: str) -> list[Any]:
    try:
        infos = filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
    except OSError as error:
        raise input_errors.InputUnreadable(where=scheme + base, reason=error) from None
    return [info for info in infos if info.type == fs.FileType.File]


def _hidden(relative: str) -> bool:
    return any(part.startswith((".", "_")) for part in relative.split("/"))


def _matching(filesystem: Any, pattern: str, scheme: str) -> list[File]:
    if _MAGIC.search(pattern.split("/")[0]):
        pattern = f"./{pattern}"
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if _MAGIC.search(part))
    base = "/".join(parts[:first])
    wanted = re.compile("".join(_segments(parts)) + r"(/.*)?")
    found = _below(filesystem, base or "/", base, scheme)
    return [file for file in found if wanted.fullmatch(file.path)]


def _segments(parts: list[str]) -> Iterable[str]:
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            yield ".*" if last else "(.*/)?"
        else:
            # translate() lets * run over slashes, which only ** may.
            yield translate(part).removesuffix(r"\Z").replace(".*", "[^/]*") + ("" if last else "/")


def _one_kind(files: list[File], place: str) -> list[File]:
    if not files:
        raise input_errors.InputEmpty(place=place, what=f"no files of a known format ({', '.join(KINDS)})")
    files.sort(key=lambda file: natural(file.path))
    for file in files:
        if file.kind != files[0].kind:
            raise input_errors.InputMixed(
                place=place, first=files[0].shown, second=file.shown, suffix=os.path.splitext(file.path)[1]
            )
    return files


def _saved(filesystem: Any, path: str, place: str, scheme: str) -> list[File] | None:
    """Return the files of a dataset that Hugging Face's save_to_disk wrote; None: the directory is none."""
    splits = _json(filesystem, f"{path}/dataset_dict.json")
    if splits is not None:
        names = splits.get("splits", [])
        example = f"{place.rstrip('/')}/{names[0] if names else 'train'}"
        raise input_errors.SplitMissing(place=place, splits=", ".join(names), example=example)
    state = _json(filesystem, f"{path}/state.json")
    if state is None or "_data_files" not in state:
        return None
    if state.get("_indices_files") or state.get("_indices_data_files"):
        reason = "its rows are picked by an index; call flatten_indices() before save_to_disk()"
        raise input_errors.InputUnreadable(where=place, reason=reason)
    infos = [_info(filesystem, f"{path}/{file['filename']}", place) for file in state["_data_files"]]
    for info in infos:
        if info.type != fs.FileType.File:
            raise input_errors.InputMissing(place=scheme + info.path)
    return [_named(filesystem, info, scheme) for info in infos]


def _json(filesystem: Any, path: str) -> Any:
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as file:
        try:
            return orjson.loads(file.read())
        except orjson.JSONDecodeError as error:
            raise input_errors.InputUnreadable(where=path, reason=error) from None
