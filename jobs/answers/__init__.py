"""The bodies of good answers: what an engine made of a request, in the shape of its endpoint."""

from dataclasses import dataclass
from typing import Any

from jobs import ids
from jobs.answers import logprobs, reasoning, tool_calls, vectors
from jobs.records import PlannedRequest, Usage

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True)
class Choice:
    """One output. `finish_reason` is stop or length; `tokens` are all that were sampled.

    `text` is all of it: with its reasoning and calls, and with the prompt if that is to be echoed.
    `reasoning_tokens` of the tokens are reasoning.
    """

    text: str
    finish_reason: str
    tokens: int
    reasoning_tokens: int = 0
    scores: list[logprobs.Token] | None = None


@dataclass(frozen=True)
class Outcome:
    """What the engine made of a request. Durations in seconds; None is what the engine cannot know.

    It has `choices` in the order of their index, or `embeddings`, one for each input.
    """

    choices: tuple[Choice, ...]
    cached_tokens: int | None
    started_at: float
    """Unix time of admission to the running batch."""
    finished_at: float
    ttft_seconds: float | None = None
    inter_token_seconds: float | None = None
    embeddings: list[list[float]] | None = None
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    padding_tokens: int | None = None


def usage(request: PlannedRequest, outcome: Outcome) -> Usage:
    """Return what a request used: its prompts once, the outputs of all choices."""
    return (
        len(request.prompt_ids) + sum(map(len, request.params.get("inputs", ()))),
        outcome.cached_tokens or 0,
        sum(choice.tokens for choice in outcome.choices),
        sum(choice.reasoning_tokens for choice in outcome.choices),
    )


def body(request: PlannedRequest, outcome: Outcome, fingerprint: str) -> dict[str, Any]:
    """Return the body of an answer, still without its ids; raises ParameterRefused and UnusableOutput."""
    prompt, cached, completion, thought = usage(request, outcome)
    if outcome.embeddings is not None:
        return {
            "object": "list",
            "data": vectors.data(outcome.embeddings, request.params),
            "model": _model(request.model, fingerprint),
            "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
        }
    chat = request.endpoint == CHAT
    shape = _chat_choice if chat else _text_choice
    answer = request.params.get("answer", {})
    return {
        "id": "",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(outcome.finished_at),
        "model": _model(request.model, fingerprint),
        "system_fingerprint": fingerprint,
        "choices": [{"index": index, **shape(one, answer)} for index, one in enumerate(outcome.choices)],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        },
    }


def _model(name: str, fingerprint: str) -> str:
    """Return the name of a model as answers say it: with its quantisation, unless it says that already."""
    suffix = "".join(fingerprint.rpartition("@")[2].partition("-")[1:])
    return name if name.endswith(suffix) else name + suffix


def named(body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Return a body with the ids of a request: its own, and those of its tool calls."""
    if "id" not in body:
        return body
    name = ids.response_id(request_id).removeprefix("batch_req_")
    prefix = "chatcmpl" if body["object"] == "chat.completion" else "cmpl"
    choices = [_named_calls(choice, request_id) for choice in body["choices"]]
    return body | {"id": f"{prefix}-{name}", "choices": choices}


def _text_choice(choice: Choice, answer: dict[str, Any]) -> dict[str, Any]:
    scored = None if choice.scores is None else logprobs.completions(choice.scores)
    return {"text": choice.text, "logprobs": scored, "finish_reason": choice.finish_reason}


def _chat_choice(choice: Choice, answer: dict[str, Any]) -> dict[str, Any]:
    text, finish_reason = choice.text, choice.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if "reasoning" in answer:
        split = reasoning.split(text, answer["reasoning"])
        message["content"] = text = split.content
        message["reasoning_content"] = split.reasoning
    if "tools" in answer:
        message["content"], calls = _calls(text, answer)
        if calls:
            message["tool_calls"] = calls
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    scored = None if choice.scores is None else logprobs.chat(choice.scores)
    return {"message": message, "logprobs": scored, "finish_reason": finish_reason}


def _calls(text: str, answer: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the content beside the calls (None: only space), and the calls. Space between calls is none."""
    content, calls = tool_calls.parse(answer["tools"], text)
    if not calls:
        return content, []
    if answer.get("parallel") is False:
        calls = calls[:1]
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    shaped = [{"id": "", "type": "function", "function": function} for function in functions]
    return content.strip() or None, shaped


def _named_calls(choice: dict[str, Any], request_id: str) -> dict[str, Any]:
    message = choice.get("message", {})
    if "tool_calls" not in message:
        return choice
    calls = [
        call | {"id": ids.call_id(request_id, choice["index"], number)}
        for number, call in enumerate(message["tool_calls"])
    ]
    return choice | {"message": message | {"tool_calls": calls}}
