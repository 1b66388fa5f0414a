"""What a deployment can say about one of its models: an entry of LONGHAUL_MODELS."""

import hashlib
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Quantized = Literal["int4", "int8"]
QuantizedGroup = Annotated[Literal[32, 64, 128], BeforeValidator(int)]
QuantizeMethod = Literal["sampled", "rtn"]
QuantizedHead = Literal["auto", "keep", "int8"]


def _name(name: str) -> str:
    """Refuse what would break Redis keys, metrics and logs, or cannot be named by LONGHAUL_MODEL."""
    if not name.isprintable() or not name.strip() or name == "none":
        raise ValueError(f"{name!a} can be no name")
    return name


Name = Annotated[str, AfterValidator(_name)]


class ModelSettings(BaseModel):
    """One served model: where it comes from and how it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="Hub id, local directory, or GGUF file.")
    revision: str | None = Field(None, description="Hub revision; None is the default branch.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto", description="Precision of the weights; auto: what suits device and model."
    )
    engine: Literal["auto", "vllm", "echo"] = Field(
        "auto",
        description="What runs it: auto is our own; vllm is vLLM, where that is installed (docs/vllm.md);"
        " 'echo' repeats the prompt: for tests and benchmarks of the system.",
    )
    task: Literal["auto", "generate", "embed"] = Field(
        "auto",
        description="What the model is for: auto lets a causal LM generate and embed, and other models embed;"
        " generate and embed allow one alone.",
    )
    context_tokens: int | None = Field(
        None, gt=0, description="Longest prompt + output; None reads it from the model."
    )
    trust_remote_code: bool = Field(
        False, description="Run the model's own Python code. Only for sources you trust."
    )
    pickle_weights: bool = Field(
        False,
        description="Also load weights that are no safetensors (pytorch_model.bin). Only from sources you"
        " trust.",
    )
    chat_template: str | None = Field(
        None, description="Path of a Jinja file to render chats with; None: the template of the model."
    )
    tool_format: Literal["auto", "hermes", "llama", "none"] = Field(
        "auto",
        description="How the model writes calls of tools; auto: as its chat template has it; none: no tools.",
    )
    reasoning: Literal["auto", "think", "none"] = Field(
        "auto",
        description="think: it reasons up to `</think>` before it answers, which becomes `reasoning_content`;"
        " auto: if its chat template says `</think>`.",
    )
    draft_model: str | None = Field(
        None,
        description="A smaller model of the same vocabulary, as a source, for LONGHAUL_SPECULATE=draft.",
    )
    quantize: Quantized | Literal["none"] | None = Field(
        None, description="As LONGHAUL_QUANTIZE, for this model; none keeps its weights as they are."
    )
    quantize_group: QuantizedGroup | None = Field(None, description="As LONGHAUL_QUANTIZE_GROUP.")
    quantize_method: QuantizeMethod | None = Field(None, description="As LONGHAUL_QUANTIZE_METHOD.")
    quantize_head: QuantizedHead | None = Field(None, description="As LONGHAUL_QUANTIZE_HEAD.")
    faults: tuple[str, ...] = Field(
        (), description="Faults the echo engine injects, such as 'kill:TEXT'. For tests."
    )

    @model_validator(mode="after")
    def _quantizable(self) -> "ModelSettings":
        if self.engine == "vllm" and self.quantization:
            raise ValueError(
                "vLLM takes weights as they come: quantize and quantize_head are for our own engine"
            )
        return self

    def fingerprint(self, name: str) -> str:
        """Return the name of this exact model in queues and prefix roots: other weights, other name."""
        facts = [self.source, self.revision or "", self.dtype, self.engine]
        said = f"-{self.quantize}" if self.quantize in ("int4", "int8") else ""
        digest = hashlib.sha256("\0".join([*facts, *filter(None, [self.quantization])]).encode()).hexdigest()
        return f"{name}@{digest[:12]}{said}"

    @property
    def quantization(self) -> str:
        """What of its weights is rounded, and how; nothing when they are as they come."""
        layers = (self.quantize, self.quantize_group, self.quantize_method)
        if self.quantize not in ("int4", "int8"):
            return " head" if self.quantize_head == "int8" else ""
        head = {"int8": " head", "keep": " keep"}.get(self.quantize_head or "", "")
        return " ".join(map(str, layers)) + head
