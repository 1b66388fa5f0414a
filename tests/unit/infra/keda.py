"""KEDA's objects as its documentation describes them (ScaledObject, ScaledJob, TriggerAuthentication; 2.19).

Only what a Longhaul deployment may use: whatever else stands in a manifest is a mistake.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints, TypeAdapter

Count = Annotated[int, Field(ge=0)]
# All metadata of a trigger is text, numbers too.
Digits = Annotated[str, StringConstraints(pattern=r"^\d+$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str
    labels: dict[str, str]


class Redis(Strict):
    """Metadata of the trigger `redis`: the length of a list, or the size of a set, a sorted set or a hash."""

    listName: str
    listLength: Annotated[Digits, StringConstraints(pattern=r"^[1-9]")]
    activationListLength: Digits
    databaseIndex: Digits = "0"
    enableTLS: Literal["true", "false"] = "false"


class Name(Strict):
    name: str


class Trigger(Strict):
    type: Literal["redis"]
    metadata: Redis
    authenticationRef: Name


class Policy(Strict):
    type: Literal["Pods", "Percent"]
    value: PositiveInt
    periodSeconds: Annotated[int, Field(gt=0, le=1800)]


class Rules(Strict):
    stabilizationWindowSeconds: Annotated[int, Field(ge=0, le=3600)]
    policies: Annotated[list[Policy], Field(min_length=1)]


class Behavior(Strict):
    scaleDown: Rules
    scaleUp: Rules | None = None


class Autoscaler(Strict):
    behavior: Behavior


class Advanced(Strict):
    horizontalPodAutoscalerConfig: Autoscaler


class Scaled(Strict):
    pollingInterval: PositiveInt
    minReplicaCount: Count = 0
    maxReplicaCount: PositiveInt
    triggers: Annotated[list[Trigger], Field(min_length=1)]


class ScaledObjectSpec(Scaled):
    scaleTargetRef: Name
    cooldownPeriod: Count
    advanced: Advanced


class Rollout(Strict):
    strategy: Literal["default", "gradual"]


class Strategy(Strict):
    strategy: Literal["default", "custom", "accurate", "eager"]


class JobSpec(Strict):
    """A batch/v1 JobSpec; its pod template is held against the schema of Kubernetes."""

    backoffLimit: Count
    template: dict[str, Any]


class ScaledJobSpec(Scaled):
    jobTargetRef: JobSpec
    successfulJobsHistoryLimit: Count
    failedJobsHistoryLimit: Count
    rollout: Rollout
    scalingStrategy: Strategy


class FromSecret(Strict):
    parameter: Literal["address", "username", "password"]
    name: str
    key: str


class AuthenticationSpec(Strict):
    secretTargetRef: Annotated[list[FromSecret], Field(min_length=1)]


class KedaObject(Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    metadata: Metadata


class ScaledObject(KedaObject):
    kind: Literal["ScaledObject"]
    spec: ScaledObjectSpec


class ScaledJob(KedaObject):
    kind: Literal["ScaledJob"]
    spec: ScaledJobSpec


class TriggerAuthentication(KedaObject):
    kind: Literal["TriggerAuthentication"]
    spec: AuthenticationSpec


Any_ = Annotated[ScaledObject | ScaledJob | TriggerAuthentication, Field(discriminator="kind")]
ADAPTER: TypeAdapter[ScaledObject | ScaledJob | TriggerAuthentication] = TypeAdapter(Any_)
