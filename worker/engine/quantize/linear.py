"""A linear layer over a weight of 4 or 8 bits."""

from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine.quantize.weights import GroupedWeight


class IntLinear(nn.Module):
    """A linear layer x [..., inputs] -> [..., outputs] in the dtype of x, like nn.Linear."""

    def __init__(self, grouped: GroupedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.grouped = grouped
        self.in_features, self.out_features = grouped.inputs, grouped.outputs
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.grouped.dequantized(x.dtype), self.bias)
