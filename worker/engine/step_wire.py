"""A step over pages as numbers for the host and one tensor for the device, and back."""

from collections.abc import Iterator

import torch
from torch import Tensor

from worker.engine.paged_step import Own, PagedStep, Rows, Shared
from worker.engine.pages import Pool


def pack(step: PagedStep) -> tuple[list[int], Tensor]:
    """Return the sizes of all its tensors, and what these hold [N] int64, in one order."""
    if step.streamed is not None:
        raise NotImplementedError("a step that reads host memory is of one process")
    out = _Writer()
    for tensor in (step.ids, step.positions, step.wanted, step.slots):
        out.tensor(tensor)
    _write_own(out, step.own)
    if out.flag(step.whole is not step.own):
        _write_own(out, step.whole)
    if out.flag(step.shared is not None):
        assert step.shared is not None
        _write_rows(out, step.shared.rows)
        out.tensor(step.shared.queries)
        out.tensor(step.shared.places)
    if out.flag(step.copies is not None):
        assert step.copies is not None
        for tensor in step.copies:
            out.tensor(tensor)
    return out.numbers, torch.cat(out.flat).to(torch.int64)


def unpack(numbers: list[int], values: Tensor, pool: Pool) -> PagedStep:
    """Return the step over another pool of the same size. Numbers that follow its own are not looked at."""
    read = _Reader(numbers, values)
    ids, positions, wanted, slots = (read.wide(1) for _ in range(4))
    own = _read_own(read)
    whole = _read_own(read) if read.flag() else own
    shared = Shared(_read_rows(read), read.wide(1), read.wide(2)) if read.flag() else None
    copies = (read.wide(1), read.wide(1)) if read.flag() else None
    return PagedStep(pool, ids, positions, wanted, slots, whole, own, shared, copies)


class _Writer:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.flat: list[Tensor] = []

    def number(self, value: int) -> None:
        self.numbers.append(value)

    def flag(self, value: bool) -> bool:
        self.numbers.append(int(value))
        return value

    def tensor(self, tensor: Tensor) -> None:
        self.numbers += tensor.shape
        self.flat.append(tensor.reshape(-1))


class _Reader:
    def __init__(self, numbers: list[int], values: Tensor) -> None:
        self._numbers: Iterator[int] = iter(numbers)
        self._wide, self._at = values, 0
        self._narrow = values.to(torch.int32)  # all at once: one launch in place of many

    def number(self) -> int:
        return next(self._numbers)

    def flag(self) -> bool:
        return bool(self.number())

    def wide(self, dimensions: int) -> Tensor:
        return self._next(self._wide, dimensions)

    def narrow(self, dimensions: int) -> Tensor:
        return self._next(self._narrow, dimensions)

    def _next(self, values: Tensor, dimensions: int) -> Tensor:
        shape = [self.number() for _ in range(dimensions)]
        first = self._at
        self._at += torch.Size(shape).numel()
        return values[first : self._at].view(shape)


def _write_own(out: _Writer, own: Own) -> None:
    out.number(own.decodes)
    for rows in (own.decode, own.prefill):
        if out.flag(rows is not None):
            assert rows is not None
            _write_rows(out, rows)


def _read_own(read: _Reader) -> Own:
    decodes = read.number()
    decode, prefill = (_read_rows(read) if read.flag() else None for _ in range(2))
    return Own(decodes, decode, prefill)


def _write_rows(out: _Writer, rows: Rows) -> None:
    for tensor in (rows.starts, rows.ends, rows.lengths, rows.tables):
        out.tensor(tensor)
    out.number(rows.most_queries)
    out.number(rows.most_keys)


def _read_rows(read: _Reader) -> Rows:
    starts, ends, lengths = (read.narrow(1) for _ in range(3))
    return Rows(starts, ends, lengths, read.narrow(2), read.number(), read.number())
