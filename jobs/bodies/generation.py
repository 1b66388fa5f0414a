"""What chat and text completions share: how tokens are chosen, and when to stop."""

from typing import Any, Literal

from pydantic import Field, field_validator

from jobs.bodies.base import Body, Off, wrong

LEAST_TEMPERATURE = 1e-6
"""Far below it, logits over temperature leave the range of floats; draws are the greedy ones by then."""
MOST_TOP_K = 2**31 - 1
"""More than any vocabulary has."""
MOST_BIASES = 1024
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""With the values that change nothing."""


class GenerationBody(Body):
    """The parameters of sampling, and those that are taken without effect."""

    max_tokens: int | None = Field(None, gt=0)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    # A factory: pydantic copies a list deeply for each body, which takes much longer.
    stop: list[str] = Field(default_factory=list)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=128)
    presence_penalty: float = Field(PENALTIES["presence_penalty"], ge=-2, le=2)
    frequency_penalty: float = Field(PENALTIES["frequency_penalty"], ge=-2, le=2)
    # Far below 0.01 a logit divided by it leaves the range of floats.
    repetition_penalty: float = Field(PENALTIES["repetition_penalty"], ge=0.01, le=10)
    logit_bias: list[tuple[int, float]] = Field(default_factory=list)
    metadata: dict[str, str] | None = None
    store: Off = False
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise wrong("it must be a string or an array of strings, none of them empty")
        if len(stops) > 4:
            raise wrong(f"at most 4 stop strings, not {len(stops)}")
        return stops

    @field_validator("metadata", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> Any:
        for name, text in value.items() if isinstance(value, dict) else ():
            if not isinstance(text, str):
                raise wrong("it must be a string", f".{name:.80}")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> list[tuple[int, float]]:
        """Sort the biases by token id; those of 0 change nothing."""
        if not isinstance(value, dict):
            raise wrong("it must be an object of token ids and biases")
        if len(value) > MOST_BIASES:
            raise wrong(f"at most {MOST_BIASES} token ids, not {len(value)}")
        biases = {_token_id(name): _bias(name, bias) for name, bias in value.items()}
        return sorted((id, bias) for id, bias in biases.items() if bias)

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many log probabilities beside the token's own; None: none at all."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """The most tokens to make, None: as many as there is room for."""
        return self.max_tokens

    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"max_tokens": self.most_tokens, "temperature": 0.0}
        if self.temperature > 0:
            params |= {
                "temperature": max(self.temperature, LEAST_TEMPERATURE),
                "top_p": self.top_p,
                "top_k": min(max(self.top_k, 0), MOST_TOP_K),
                "min_p": self.min_p,
                "seed": self.seed,
            }
        params |= {"stop": self.stop, "min_tokens": self.min_tokens, "ignore_eos": self.ignore_eos}
        if self.n > 1:
            params["n"] = self.n
        params |= {
            name: value for name, neutral in PENALTIES.items() if (value := getattr(self, name)) != neutral
        }
        if self.logit_bias:
            params["logit_bias"] = [list(pair) for pair in self.logit_bias]
        if self.top_logprobs_wanted is not None:
            params["logprobs"] = self.top_logprobs_wanted
        return params


def _token_id(name: Any) -> int:
    plain = str(name) if type(name) is int else name
    # One form only: with "07" or " 7" two names could mean one token.
    if not isinstance(plain, str) or not plain.isascii() or not plain.isdecimal() or len(plain) > 10:
        raise wrong(f"{name!r:.40} is no token id")
    if plain != str(int(plain)):
        raise wrong(f"token id {name!r:.40} must be written {int(plain)}")
    return int(plain)


def _bias(name: Any, bias: Any) -> float:
    if type(bias) not in (int, float) or not -100 <= bias <= 100:
        raise wrong("a bias must be a number of -100..100", f".{name:.40}")
    return float(bias)
