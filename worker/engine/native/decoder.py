"""A whole decoder layer in one call of the compiled kernels."""

import ctypes
from typing import Any

from torch import Tensor

from worker.engine.attention import Scoring
from worker.engine.native import attention, library, panels
from worker.engine.native.library import Kernels, pointer
from worker.engine.packed import PackedGate, PackedLinear


class NativeDecoder:
    """Norm, attention, norm and gated MLP [T, hidden] with merged weights, each added to the residual stream.

    What it is given must stay where it is: only addresses are kept besides the modules themselves.
    """

    def __init__(
        self,
        kernels: Kernels,
        layer: int,
        counts: tuple[int, int, int],
        scoring: Scoring,
        linears: tuple[PackedLinear, PackedLinear, PackedGate, PackedLinear],
        epsilons: tuple[float, float],
        head_norms: Tensor | None,
        head_epsilon: float,
    ) -> None:
        """Take the numbers of query, key and value heads, and qkv, output, gate with up, and down."""
        heads, groups, _ = counts
        qkv, output, gate_up, down = linears
        weights = {"qkv": qkv.panels, "output": output.panels, "gate_up": gate_up.panels, "down": down.panels}
        size = qkv.panels.outputs // sum(counts)
        self._sinks = None if scoring.sinks is None else scoring.sinks.to(kernels.dtype).contiguous()
        self._kept = (linears, head_norms)
        kinds = attention.layer_structure(kernels)
        self._attention = kinds(
            layer=layer,
            heads=heads,
            groups=groups,
            key_size=size,
            value_size=size,
            scale=scoring.scale,
            softcap=scoring.softcap or 0.0,
            window=scoring.window or 0,
            sinks=pointer(self._sinks),
            head_norm=pointer(head_norms),
            epsilon=head_epsilon,
        )
        last = {**dict.fromkeys(weights, panels.Weight), "attention": kinds}
        fields = "hidden inner epsilon mlp_epsilon x scratch wanted wanted_count"
        structure = library.structure("Decoder", fields, kernels.real, "epsilon mlp_epsilon", **last)
        self._task = structure(
            hidden=down.panels.outputs,
            inner=gate_up.panels.outputs,
            epsilon=epsilons[0],
            mlp_epsilon=epsilons[1],
            **{name: weight.structure() for name, weight in weights.items()},
            attention=self._attention,
        )

    def task(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None) -> Any:
        """Return what the kernels are to do to x [T, hidden], all but the scratch memory."""
        task = self._task
        task.x, task.attention.cos, task.attention.sin = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        task.wanted, task.wanted_count = pointer(wanted), 0 if wanted is None else wanted.numel()
        return ctypes.byref(task)

    def point_to(self, scratch: int) -> None:
        self._task.scratch = scratch
