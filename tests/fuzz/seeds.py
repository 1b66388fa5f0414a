"""What is right: requests that use about every parameter, creations, and schemas."""

from typing import Any

from jobs import bodies

TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,5}$", "minLength": 1},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3},
        "c": {"anyOf": [{"const": 1}, {"enum": ["x", None]}]},
        "d": {"type": "integer", "minimum": 0, "maximum": 10},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "number", "exclusiveMinimum": -1}},
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.5, "seed": 1},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Weather?", "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "stop": ["\n", "x"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    },
    {
        "messages": [{"role": "developer", "content": "x"}, {"role": "assistant", "content": "So, I"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"1": -100, "2": 5.5},
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
    },
    {
        "messages": [{"role": "user", "content": "json"}],
        "response_format": {"type": "json_object"},
        "max_completion_tokens": 3,
        "min_tokens": 1,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "truncate_prompt_tokens": 20,
    },
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "Once", "max_tokens": 5, "echo": True, "logprobs": 2, "stop": "x"},
    {"prompt": [1, 2, 3], "n": 2, "best_of": 2, "temperature": 1.0, "seed": 5, "truncate_prompt_tokens": 2},
]
EMBEDDINGS: list[dict[str, Any]] = [
    {"input": "hi", "encoding_format": "base64", "dimensions": 8},
    {"input": ["a", "b"], "encoding_format": "float", "truncate_prompt_tokens": 5},
    {"input": [[1, 2], [3]]},
]
BODIES = {"/v1/chat/completions": CHATS, "/v1/completions": COMPLETIONS, "/v1/embeddings": EMBEDDINGS}
CREATIONS: list[dict[str, Any]] = [
    {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
    {
        "requests": [{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}],
        "endpoint": "/v1/embeddings",
        "completion_window": "7d",
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        "priority": 5,
    },
]
SCHEMA_NAMES = [
    *("type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "enum", "const"),
    *(
        "$ref",
        "$defs",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "multipleOf",
        "minItems",
        "uniqueItems",
        "not",
    ),
    *(
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "if",
        "then",
        "else",
        "dependentRequired",
    ),
]
NAMES = sorted(
    {name for body in bodies.BODIES.values() for name in body.model_fields}
    | set(bodies.REFUSED)
    | {"custom_id", "method", "url", "body", "name", "tool_calls", "tool_call_id", "arguments", "function"}
    | {"refusal", "audio", "reasoning_content", "parameters", "strict", "json_schema", "schema", "metadata"}
    | {"input_file_id", "requests", "endpoint", "completion_window", "output_expires_after", "priority"}
)


def line(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request as a line holds it."""
    return {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "m", **body}}
