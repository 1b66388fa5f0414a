"""A device for tests that does everything late: whatever is launched runs only when a value is waited for.

Tensors of it are shapes until then. So what a real device would read too early or too late comes out wrong
here: a buffer that is filled again before the copy from it, logits that the next repetition overwrites, a
step that is launched before the ids it takes are chosen. Reading a value in any other way than by `fetch`
raises Synchronised. A recorded step repeats the operations of its recording, not its Python, as a CUDA graph
does, into the same memory.

What it cannot show: races between streams, kernels that wait by themselves, memory that is given back too
early, and code below torch (it has no data pointers). Inside of `with device`, operations on ordinary tensors
are late too; outside, only those on a tensor of it are.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from worker.engine import ring


class Synchronised(RuntimeError):
    """The host asked for a value that the device has not computed."""


class LateTensor(Tensor):
    """A tensor of a LateDevice; `here` is what it is once the device has got there."""

    device_of: "LateDevice"
    meta: Tensor
    here: Tensor | None

    @staticmethod
    def __new__(cls, device: "LateDevice", meta: Tensor) -> "LateTensor":
        size, stride, offset = meta.size(), meta.stride(), meta.storage_offset()
        with torch.inference_mode(False):  # torch takes no view of such a tensor for one of inference mode
            made = Tensor._make_wrapper_subclass(
                cls, size, strides=stride, storage_offset=offset, dtype=meta.dtype, device="cpu"
            )
        made.device_of, made.meta, made.here = device, meta, None
        return made

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LateTensor))
        return first.device_of.launch(operation, args, kwargs or {})

    def tolist(self) -> Any:
        raise Synchronised("tolist")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise Synchronised("numpy")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Synchronised("numpy")

    def data_ptr(self) -> int:
        raise Synchronised("data_ptr")

    def __repr__(self, **_: Any) -> str:
        return f"LateTensor({list(self.shape)}, {self.dtype})"


class LateDevice:
    """A device.Device. `events` are what was asked for in this order: ("stage", n), ("launch", operation),
    ("record", k), ("replay", k), ("fetch", n), ("wait", n). Each recording takes `recording_bytes` of `free`.
    """

    ahead = True

    def __init__(self, free: int = 2**40, recording_bytes: int = 0) -> None:
        self.torch = torch.device("cpu")
        self.events: list[tuple[str, int | str]] = []
        self.buffers = ring.Ring(_Buffer)
        self.free = free
        self._recording_bytes = recording_bytes
        self._queue: deque[Callable[[], None]] = deque()
        self._recording: list[Callable[[], None]] | None = None
        self._mode = _Mode(self)
        self._counts: dict[str, int] = {}

    def __enter__(self) -> "LateDevice":
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def stage(self, values: NDArray[Any]) -> Tensor:
        if self._recording is not None:
            raise RuntimeError("a recorded step stages an array")
        self._log("stage")
        buffer = self.buffers.take(values.nbytes)
        np.copyto(buffer.view(values.shape, values.dtype), values)
        buffer.busy = True
        staged = LateTensor(self, _meta(torch.from_numpy(np.empty(values.shape, values.dtype))))

        def copy() -> None:
            staged.here = torch.from_numpy(buffer.view(values.shape, values.dtype).copy())
            buffer.busy = False

        self._queue.append(copy)
        return staged

    def fetch(self, values: Tensor) -> "_Fetch":
        return _Fetch(self, values, self._log("fetch"))

    def pinned(self, size: int) -> Tensor:
        """Return host memory that copies fill, or read, when they are done."""
        made = LateTensor(self, torch.empty(size, dtype=torch.uint8, device="meta"))
        made.here = torch.zeros(size, dtype=torch.uint8)
        return made

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        number = self._log("record")
        run()  # to warm up
        self._recording = operations = []
        try:
            result = run()
        finally:
            self._recording = None
        self.free -= self._recording_bytes
        self._queue.extend(operations)  # the memory of what it returns is there at once

        def repeat() -> None:
            self.events.append(("replay", number))
            self._queue.extend(operations)

        return repeat, result

    def free_bytes(self) -> int:
        return self.free

    def finish(self) -> None:
        """Do all that was launched."""
        while self._queue:
            self.do_next()

    def do_next(self) -> None:
        """Do what was launched first of what is not done."""
        with _disable_current_modes(), torch.inference_mode():
            self._queue.popleft()()

    @property
    def launched(self) -> int:
        """How much of what was launched is not done."""
        return len(self._queue)

    def launch(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note an operation of torch; return tensors of the shapes it will have."""
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise Synchronised("item")
        results = self._shapes(operation, args, kwargs)
        if not getattr(operation, "is_view", False):
            self.events.append(("launch", str(operation)))
        recorded = self._recording is not None

        def do() -> None:
            real_args, real_kwargs = tree_map_only(Tensor, _real, (args, kwargs))
            found = operation(*real_args, **real_kwargs)
            memory = {_memory(leaf) for leaf in tree_leaves((real_args, real_kwargs)) if _has_memory(leaf)}
            for late, real in zip(tree_leaves(results), tree_leaves(found), strict=True):
                if isinstance(late, LateTensor):
                    _settle(late, real, recorded and _memory(real) not in memory)

        (self._queue if self._recording is None else self._recording).append(do)
        return results

    def _shapes(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        twins: dict[int, Tensor] = {}

        def twin(tensor: Tensor) -> Tensor:
            meta = tensor.meta if isinstance(tensor, LateTensor) else _meta(tensor)
            twins[id(meta)] = tensor
            return meta

        metas, meta_kwargs = tree_map_only(Tensor, twin, (args, kwargs))
        if any(argument.name == "device" for argument in operation._schema.arguments):
            meta_kwargs["device"] = torch.device("meta")
        try:
            with _disable_current_modes(), torch.inference_mode():
                found = operation(*metas, **meta_kwargs)
        except NotImplementedError as error:  # its shape depends on values
            raise Synchronised(str(operation)) from error

        def late(meta: Tensor) -> Tensor:
            same = twins.get(id(meta))  # an operation in place returns what it was given
            return LateTensor(self, meta) if same is None else same

        return tree_map_only(Tensor, late, found)

    def _log(self, event: str) -> int:
        number = self._counts[event] = self._counts.get(event, -1) + 1
        self.events.append((event, number))
        return number


class _Mode(TorchDispatchMode):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._device.launch(operation, args, kwargs or {})


class _Buffer:
    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, dtype=np.uint8)
        self.busy = False

    def done(self) -> bool:
        return not self.busy

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        size = int(np.prod(shape)) * dtype.itemsize
        return self.bytes[:size].view(dtype).reshape(shape)


class _Fetch:
    """Values that the host sees when it waits, and when the device has got that far: no further."""

    def __init__(self, device: LateDevice, values: Tensor, number: int) -> None:
        self._device = device
        self._number = number
        self._here: Tensor | None = None

        def copy() -> None:
            self._here = _real(values).clone()

        device._queue.append(copy)

    def wait(self) -> NDArray[Any]:
        self._device.events.append(("wait", self._number))
        while self._here is None:
            self._device.do_next()
        return np.asarray(Tensor.numpy(self._here))


def _real(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, LateTensor):
        return tensor
    assert tensor.here is not None, "it is read before it is computed: it was made while a step was recorded"
    return tensor.here


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _settle(late: LateTensor, real: Tensor, own_memory: bool) -> None:
    """Give a tensor its values; what a recorded step computes lies at the same place each time."""
    if own_memory and late.here is not None:
        late.here.copy_(real)
    else:
        late.here = real


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
