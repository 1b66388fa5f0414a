"""How `longhaul autoscale` scales workers; part of the one settings class (jobs.settings)."""

from pydantic import Field
from pydantic_settings import BaseSettings


class ScaleSettings(BaseSettings):
    """Scaling (docs/scaling.md)."""

    scale_target_seconds: float = Field(
        900,
        gt=0,
        description="longhaul autoscale: the time in which what is left should be done; shorter takes more"
        " workers at once (docs/scaling.md).",
    )
    scale_idle_seconds: float = Field(
        60,
        gt=0,
        description="longhaul autoscale: how long workers stay that are not needed; at least half the time"
        " that one takes to start.",
    )

    scale_startup_limit_seconds: float = Field(
        1800,
        ge=0,
        description="longhaul autoscale: a worker that has been loading for longer, and for longer than five"
        " start-ups as they were measured, is killed and counts as crashed; 0: never. The first start may"
        " have to download the model.",
    )
