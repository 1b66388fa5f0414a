"""A team: processes of one machine that run one model together, each with a share of every layer's weights.

transformers shards a model by its own plan (Megatron-LM, Shoeybi et al. 2019): columns of what makes queries,
keys, values and the inner layer of the MLP, rows of what follows, and a sum over the team behind these.
"""

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from worker.engine.types import EngineConfig

MESSAGE_NUMBERS = 64
# A team may be idle for days. That somebody has ended shows at once: the connection breaks.
_NO_TIMEOUT = timedelta(days=3650)
_ENDED = "ended"


@dataclass(frozen=True)
class Team:
    """This process's place in its team; rank 0 leads.

    Messages go over `control`, which is gloo: whoever receives one needs its numbers on the host, and with
    NCCL would wait for the device to have them. What lies on the devices is shared there, in the order of
    what is launched, so that nobody waits for a device.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    store: distributed_c10d.Store

    def send(self, *numbers: int) -> None:
        """Send a message to all others, which are to receive it."""
        message = torch.zeros(MESSAGE_NUMBERS, dtype=torch.int64)
        message[: len(numbers)] = torch.tensor(numbers)
        dist.broadcast(message, 0, group=self.control)

    def receive(self) -> list[int]:
        """Wait for the next message of rank 0; raises RuntimeError when rank 0 has ended."""
        message = torch.zeros(MESSAGE_NUMBERS, dtype=torch.int64)
        dist.broadcast(message, 0, group=self.control)
        return message.tolist()

    def share(self, values: Tensor) -> Tensor:
        """Fill a tensor on the device of everybody with that of rank 0; return it."""
        dist.broadcast(values, 0)
        return values

    def meet(self) -> None:
        """Wait until everybody is here, however long it takes."""
        self.least(0)  # a barrier of a group that is bound to a GPU runs there, and gloo has none

    def least(self, value: int) -> int:
        """Return the least of everybody's values."""
        least = torch.tensor([value])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.control)
        return int(least)

    def end(self) -> None:
        """Say that rank 0 ends by itself, and how that went is in its exit code."""
        self.store.set(_ENDED, "1")

    @property
    def ended(self) -> bool:
        """Whether rank 0 has said so."""
        return bool(self.store.check([_ENDED]))


_team: Team | None = None


def current() -> Team | None:
    """Return the team that this process is in, if it is in any."""
    return _team


def join(device: str, timeout_seconds: float) -> Team:
    """Wait for all that torchrun has started and be a team, which `current` then returns.

    Afterwards, whoever waits for another within a step for `timeout_seconds` fails. Raises ValueError for
    what cannot be one team.
    """
    global _team
    _check_environment()
    # All are on this machine; what its name resolves to may be any interface, or none.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    here = _device(device, int(os.environ["LOCAL_RANK"]))
    if here.type == "cuda":
        torch.cuda.set_device(here)
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group(
        "nccl" if here.type == "cuda" else "gloo",
        store=distributed_c10d.PrefixStore("steps", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=here if here.type == "cuda" else None,
    )
    control = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
    # A connection of its own: others wait on theirs, and `ended` must not wait behind them.
    _team = Team(rank, size, here, control, store.clone())
    return _team


def _check_environment() -> None:
    size, local_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if size != local_size:
        raise ValueError(f"a model is spread over one machine: {size} ranks, but {local_size} on this one")


def _device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a rank: the GPU of that number where there are any."""
    count = torch.cuda.device_count()
    if wanted not in ("auto", "cuda") and not (wanted == "cpu" and count == 0):
        raise ValueError(
            f"under torchrun each rank takes the GPU of its number, not {wanted!r} (LONGHAUL_DEVICE);"
            " CUDA_VISIBLE_DEVICES chooses among them"
        )
    if count == 0 and wanted != "cuda":
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(f"rank {local_rank} has no GPU: there are {count} (torchrun --nproc-per-node)")
    return torch.device("cuda", local_rank)


def load_options(team: Team, config: Any, wanted: EngineConfig, gguf: bool) -> dict[str, Any]:
    """Return what makes transformers load the share of one rank; raises ValueError with one line for a model
    that cannot be shared.
    """
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
    if wanted.task == "embed":
        raise ValueError(f"a model spread over {team.size} ranks does not embed")
    if wanted.speculate == "draft":
        raise ValueError(f"a model spread over {team.size} ranks has no draft model (LONGHAUL_SPECULATE)")
    if gguf:
        raise ValueError(f"a GGUF file is not spread over {team.size} ranks; safetensors are")
    if not plan:
        raise ValueError(f"transformers has no plan to spread a {config.model_type} model over several ranks")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if any(count % team.size for count in (heads if isinstance(heads, list) else [heads or 0])):
            raise ValueError(f"{team.size} ranks do not divide its {heads} heads ({name})")
    from transformers.distributed.configuration_utils import DistributedConfig

    # A share goes to its rank's device by itself: to be given one, too, transformers refuses.
    return {"distributed_config": DistributedConfig(tp_size=team.size, tp_plan="auto"), "device_map": None}


def style_of(model: Any, name: str) -> str | None:
    """Return how the plan spreads a module of a share; None: each rank has all of it."""
    style: str | None = (model.tp_plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
    return style


def is_share(model: Any) -> bool:
    """Tell whether a model has only one rank's share of the weights. Its modules look like whole ones."""
    return (getattr(model, "_tp_size", None) or 1) > 1
