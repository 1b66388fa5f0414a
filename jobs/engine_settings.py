"""What a worker's engine can be told; part of the one settings class (jobs.settings)."""

from typing import Literal

from pydantic import Field, PositiveInt
from pydantic_settings import BaseSettings

from jobs.model_settings import Quantized, QuantizedGroup, QuantizedHead, QuantizeMethod


class EngineSettings(BaseSettings):
    """How much runs at once, in what memory, and by what means."""

    max_running: int = Field(
        64, gt=0, description="Most requests in the running batch. Unless it is set, 256 on a GPU."
    )
    max_queue_delay_seconds: float = Field(
        0,
        ge=0,
        description="Longest a request waits for company before it runs in the fast engine: larger batches,"
        " later first tokens; 0 starts all at once.",
    )
    preferred_batch_sizes: tuple[PositiveInt, ...] = Field(
        (),
        description="Sizes of the fast engine's running batch for which nobody waits out"
        " max_queue_delay_seconds (JSON list); max_running always is one.",
    )
    max_batch_tokens: int | None = Field(
        None,
        gt=0,
        description="Most tokens, prompts and outputs so far, with which another request joins the running"
        " batch, shared prefixes counted once: shorter steps, fewer at a time. A larger request runs alone."
        " None: as memory allows, and 65536, padding and expected outputs included, in the fallback engine.",
    )
    kv_memory_bytes: int | None = Field(
        None,
        gt=0,
        description="Memory for keys and values, kept prefixes included; None: a quarter of what is free"
        " at the start, on a GPU all that a largest step leaves. An idle worker takes it from the system"
        " ahead of use.",
    )
    kv_host_bytes: int = Field(
        0,
        ge=0,
        description="Host memory for keys and values that a GPU has no room for: prefixes are copied back"
        " instead of computed again, and a request may be longer than the GPU holds.",
    )
    prefill_chunk_tokens: int = Field(
        512,
        gt=0,
        description="Most prompt tokens computed in one step: more make prefill faster, and those who decode"
        " meanwhile wait longer for their next token. Unless it is set, 2048 on a GPU.",
    )
    prefix_ttl_seconds: float | None = Field(
        None,
        gt=0,
        description="How long keys and values of a prefix are kept after its last use, so that later requests"
        " find it computed; None: until their memory is needed.",
    )
    share_prefixes: bool = Field(
        True,
        description="Compute a prefix that requests of one tenant have in common once; false computes every"
        " prompt whole, with the same results.",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, ...")
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="What a CPU computes with: auto is our own kernels, compiled on the first start, and"
        " torch's where there is no C++ compiler; native refuses to start without; torch never compiles.",
    )
    attention: Literal["auto", "flash", "dense"] = Field(
        "auto",
        description="What attends on a GPU: flash is pages and flash-attn, and refuses to start without;"
        " dense is torch's own attention; auto is flash where it can, else dense, with a log line and a"
        " counter. A CPU has its own.",
    )
    cuda_graphs: bool = Field(
        True,
        description="Record decode steps over pages once for each batch size, and launch each as a whole.",
    )
    run_ahead: bool = Field(
        True,
        description="Launch the next decode step on a GPU before the tokens of the last one are read, with"
        " the same results.",
    )
    tf32: bool = Field(
        False,
        description="Let a GPU round the factors of float32 products to 10 bits of mantissa: several times as"
        " fast, not exact. Half precision does not change.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compile what a layer does between matrix products (torch.compile): auto on a GPU that"
        " has Triton; on also on a CPU; what does not compile runs as it is, with a log line.",
    )
    speculate: Literal["off", "lookup", "draft"] = Field(
        "off",
        description="How the fast engine guesses next tokens while few requests run, to check several in one"
        " step, with the same results: lookup finds them in prompt and output, draft asks the draft_model.",
    )
    speculate_tokens: int = Field(10, gt=0, description="Most tokens guessed for a request in one step.")
    speculate_below: int = Field(8, gt=0, description="Nothing is guessed while so many requests run.")
    draft_kv_memory_bytes: int = Field(
        256 << 20, gt=0, description="Memory for keys and values of a draft model, on top of kv_memory_bytes."
    )
    quantize: Quantized | None = Field(
        None,
        description="Round the weights of a model's layers to so many bits when it is loaded; the result is"
        " kept on disk (docs/quantization.md). Models of the engines vllm and echo are as they are.",
    )
    quantize_group: QuantizedGroup = Field(
        64, description="How many weights in a row share a scale: fewer are more exact and take more memory."
    )
    quantize_method: QuantizeMethod = Field(
        "sampled",
        description="How weights are rounded: sampled chooses scales by what goes into them while the model"
        " runs over tokens of its own, rtn rounds each to the nearest, which is quicker and worse.",
    )
    quantize_head: QuantizedHead = Field(
        "auto",
        description="The head, which makes tokens of the last layer's output: int8 rounds it, too, keep does"
        " not, auto does on a CPU if the layers are rounded: it is much of what a step reads.",
    )
