"""Make of a request's body what is planned: a prompt, rendered and encoded, and parameters.

Of many: `chat` of each, all are rendered together, `prepare` with the text of each, all are encoded together.
"""

from typing import Any

from jobs import errors, grammars
from jobs.bodies.base import Body, refuse
from jobs.bodies.chat import ChatBody
from jobs.bodies.completion import CompletionBody
from jobs.bodies.embedding import EmbeddingBody
from jobs.bodies.generation import GenerationBody
from jobs.bodies.message import OF_ANSWERS
from jobs.prepared import Prepared, PreparedInputs
from jobs.template import Chat, ChatTemplate
from jobs.tokens import Tokenizer


def chat(body: Body, tokenizer: Tokenizer) -> Chat | None:
    """Return the chat of a body, to be rendered for `prepare`; None: it has none. Raises ParameterRefused."""
    if isinstance(body, GenerationBody) and body.logit_bias:
        _in_vocabulary(body.logit_bias[-1][0], "logit_bias", tokenizer)
    if not isinstance(body, ChatBody):
        return None
    _known_to(tokenizer.template, body)
    variables = body.chat_template_kwargs
    if body.reasoning_effort is not None:
        variables = variables | {"reasoning_effort": body.reasoning_effort}
    return Chat(
        [message.plain() for message in body.messages],
        tools=body.offered,
        variables=variables,
        continue_final=body.continue_final_message,
        generation_prompt=body.add_generation_prompt is not False,
    )


def prepare(
    row: int, custom_id: str, body: Body, text: str | None, tokenizer: Tokenizer
) -> Prepared | PreparedInputs:
    """Make a prompt and parameters of a body and `text`, its rendered chat; raises ParameterRefused."""
    if isinstance(body, EmbeddingBody):
        return _inputs(row, custom_id, body, tokenizer)
    if isinstance(body, ChatBody):
        assert text is not None
        params = _params(body, text, tokenizer.template)
        return Prepared(row, custom_id, text, True, params, body.truncate_prompt_tokens)
    assert isinstance(body, CompletionBody)
    if isinstance(body.prompt, list):
        _in_vocabulary(max(body.prompt), "prompt", tokenizer)
    return Prepared(row, custom_id, body.prompt, False, body.params(), body.truncate_prompt_tokens)


def encode(requests: list[Prepared | PreparedInputs], tokenizer: Tokenizer) -> list[Any]:
    """Return the prompt ids of prepared requests in their order; of an embedding request, of all inputs."""
    chats: list[str] = []
    raw: list[str] = []
    for request in requests:
        if isinstance(request, PreparedInputs):
            return _encode_inputs(requests, tokenizer)  # a job has one endpoint
        if isinstance(request.prompt, str):
            (chats if request.rendered else raw).append(request.prompt)
    chat_ids = iter(tokenizer.encode_chats(chats))
    raw_ids = iter(tokenizer.encode_prompts(raw))
    return [
        r.prompt if isinstance(r.prompt, list) else next(chat_ids if r.rendered else raw_ids)
        for r in requests
        if isinstance(r, Prepared)
    ]


def _params(body: ChatBody, text: str, template: ChatTemplate) -> dict[str, Any]:
    """Return a chat's parameters with what follows from the template, and from the text it made."""
    continued = body.messages[-1].content if body.continue_final_message else None
    reasoning = template.reasoning(text, continued)
    params, answer = body.params(), _answer(body, template, reasoning)
    if answer:
        params["answer"] = answer
    if body.constrained:
        grammar = grammars.build(
            body.response_format,
            body.offered,
            body.tool_choice if body.offered else "none",
            template.tool_format if body.offered else None,
            reasoning,
            body.parallel_tool_calls,
        )
        if grammar is not None:
            params["grammar"] = grammar
    return params


def _known_to(template: ChatTemplate, body: ChatBody) -> None:
    """Refuse what the template would not look at."""
    if body.offered and template.tool_format is None:
        reason = "this model's chat template has no format of tool calls that Longhaul knows"
        refuse("tools", body.offered, reason)
    if body.offered and not template.takes("tools"):
        refuse("tools", body.offered, "this model's chat template does not show tools")
    if body.reasoning_effort is not None:
        if not template.takes("reasoning_effort"):
            reason = "this model's chat template has no variable reasoning_effort"
            refuse("reasoning_effort", body.reasoning_effort, reason)
        if body.chat_template_kwargs.get("reasoning_effort", body.reasoning_effort) != body.reasoning_effort:
            refuse("reasoning_effort", body.reasoning_effort, "chat_template_kwargs has another")
    for name, value in body.chat_template_kwargs.items():
        if not template.takes(name):
            reason = "this model's chat template has no such variable"
            refuse(f"chat_template_kwargs.{name:.80}", value, reason)
    for index, message in enumerate(body.messages):
        for name, value in message.further.items():
            if name not in OF_ANSWERS and not template.mentions(name):
                refuse(f"messages[{index}].{name:.80}", value, "unknown to this model's chat template")


def _answer(body: ChatBody, template: ChatTemplate, reasoning: str | None) -> dict[str, Any]:
    """Return how the answer's text is to be taken apart."""
    answer: dict[str, Any] = {}
    if body.offered:
        answer["tools"] = template.tool_format
        if not body.parallel_tool_calls:
            answer["parallel"] = False
    if reasoning is not None:
        answer["reasoning"] = reasoning
    return answer


def _inputs(row: int, custom_id: str, body: EmbeddingBody, tokenizer: Tokenizer) -> PreparedInputs:
    most = body.truncate_prompt_tokens
    if most == -1:
        most = tokenizer.context_tokens
    if isinstance(body.input[0], str):
        if most is not None and most <= tokenizer.special_tokens:
            reason = f"the model adds {tokenizer.special_tokens} special tokens to a text"
            refuse("truncate_prompt_tokens", most, reason)
    else:
        for index, ids in enumerate(body.input):
            _in_vocabulary(max(ids), f"input[{index}]", tokenizer)
    return PreparedInputs(row, custom_id, body.input, body.params(), most)


def _encode_inputs(requests: list[Any], tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Encode the texts of all requests, those that keep equally many tokens together."""
    texts: dict[int | None, list[str]] = {}
    for request in requests:
        if isinstance(request.inputs[0], str):
            texts.setdefault(request.most, []).extend(request.inputs)
    encoded = {
        most: iter(tokenizer.encode_prompts(some) if most is None else tokenizer.encode_inputs(some, most))
        for most, some in texts.items()
    }
    return [
        [
            next(encoded[request.most]) if isinstance(one, str) else one[: request.most]
            for one in request.inputs
        ]
        for request in requests
    ]


def _in_vocabulary(id: int, param: str, tokenizer: Tokenizer) -> None:
    if id >= tokenizer.vocabulary:
        message = f"Token id {id} is outside the vocabulary of {tokenizer.vocabulary}."
        raise errors.ParameterRefused(message, param=param)
