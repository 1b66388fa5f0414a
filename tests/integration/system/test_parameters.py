"""Every kind of request through the whole system: the answer is what was asked for, in OpenAI's shapes."""

import base64
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import torch
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.model_settings import ModelSettings
from tests.integration.system.system import MODEL, System, said

Start = Callable[..., System]
_TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sky", "sea"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def one(start_system: Start, tiny: Path) -> Iterator[System]:
    """A system whose tiny model has a template with tools and reasoning."""
    served = ModelSettings(source=str(tiny), chat_template=str(_TEMPLATES / "qwen3.jinja"))
    system = start_system(models={MODEL: served})
    system.start_worker()
    yield system
    system.stop()


def run(
    one: System, endpoint: str, bodies: dict[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Run bodies; return the bodies of answers and the errors by custom_id."""
    lines = [
        {"custom_id": name, "method": "POST", "url": endpoint, "body": {"model": MODEL} | body}
        for name, body in bodies.items()
    ]
    job_id = one.submit(lines, endpoint=endpoint)
    assert one.finished(job_id).status == "completed"
    one.accounted(job_id, list(bodies))
    output, failed = one.lines(job_id)
    answers = {each["custom_id"]: each["response"]["body"] for each in output}
    return answers, {each["custom_id"]: each["response"]["body"]["error"] for each in failed}


def chat(one: System, **bodies: dict[str, Any]) -> dict[str, ChatCompletion]:
    """Run chats that must not fail."""
    said = {
        name: {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8} | body
        for name, body in bodies.items()
    }
    answers, failed = run(one, "/v1/chat/completions", said)
    assert not failed
    return {name: ChatCompletion.model_validate(body, strict=True) for name, body in answers.items()}


def test_sampling_parameters_in_one_batch(one: System) -> None:
    base = {"temperature": 1, "seed": 5, "ignore_eos": True}
    long = {"temperature": 0, "ignore_eos": True, "max_tokens": 80}
    done = chat(
        one,
        greedy={"temperature": 0, "ignore_eos": True},
        one_token_left={"top_k": 1, "ignore_eos": True},
        nucleus={"top_p": 1e-9, "ignore_eos": True},
        biased={"temperature": 0, "ignore_eos": True, "logit_bias": {"41": 100}},
        choices=base | {"n": 3},
        first=base,
        long=long,
        penalised=long | {"presence_penalty": 2, "frequency_penalty": 2},
        repeated=long | {"repetition_penalty": 5.0},
    )
    texts = {name: [choice.message.content for choice in each.choices] for name, each in done.items()}
    assert texts["one_token_left"] == texts["nucleus"] == texts["greedy"]
    assert len(set(texts["biased"][0] or "")) == 1
    assert len(texts["choices"]) == 3
    assert len(set(texts["choices"])) == 3
    assert texts["choices"][0] == texts["first"][0]
    variety = {name: len(set(texts[name][0] or "")) for name in ("long", "penalised", "repeated")}
    assert variety["penalised"] > variety["long"]
    assert variety["repeated"] > variety["long"]
    assert [choice.index for choice in done["choices"].choices] == [0, 1, 2]
    usage = done["choices"].usage
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.total_tokens == usage.prompt_tokens + 24


def test_log_probabilities_are_those_of_a_plain_forward(one: System, tiny: Path) -> None:
    done = chat(one, a={"temperature": 0, "logprobs": True, "top_logprobs": 5, "ignore_eos": True})
    found = done["a"].choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 8
    tokenizer = AutoTokenizer.from_pretrained(tiny, chat_template=(_TEMPLATES / "qwen3.jinja").read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    output = [tokenizer.convert_tokens_to_ids(_piece(each.bytes)) for each in found.content]
    with torch.inference_mode():
        logits = model(torch.tensor([ids + output])).logits[0].log_softmax(-1)
    for at, each in enumerate(found.content):
        under = logits[len(ids) - 1 + at]
        assert each.logprob == pytest.approx(float(under[output[at]]), abs=1e-3)
        highest = under.topk(5).values.tolist()
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(highest, abs=1e-3)


def _piece(data: list[int] | None) -> str:
    """Return a byte as the tiny model's tokenizer spells it."""
    assert data is not None
    (byte,) = data
    return "Ġ" if byte == 32 else chr(byte)


def test_stop_strings_cut_the_text(one: System) -> None:
    whole = chat(one, a={"temperature": 0, "ignore_eos": True})["a"].choices[0].message.content or ""
    stop = whole[3:5]
    cut = chat(one, a={"temperature": 0, "ignore_eos": True, "stop": stop})["a"].choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_answers_have_the_form_that_was_asked_for(one: System) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
    long = {"max_tokens": 300, "temperature": 1, "chat_template_kwargs": {"enable_thinking": False}}
    done = chat(
        one,
        **{f"s{i}": long | {"seed": i, "response_format": form} for i in range(4)},
        cut=long | {"max_tokens": 3, "response_format": form},
    )
    for name in ("s0", "s1", "s2", "s3"):
        choice = done[name].choices[0]
        assert choice.finish_reason == "stop", choice
        jsonschema.validate(orjson.loads(choice.message.content or ""), _SCHEMA)
    assert done["cut"].choices[0].finish_reason == "length"


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_tools_are_called(one: System, tool_choice: Any) -> None:
    body = {"tools": [_TOOL], "tool_choice": tool_choice, "max_tokens": 300, "temperature": 1, "n": 2}
    body |= {"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False}}
    done = chat(one, a=body)["a"]
    for choice in done.choices:
        assert choice.finish_reason == "tool_calls", choice
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "look"
        jsonschema.validate(orjson.loads(call.function.arguments), _TOOL["function"]["parameters"])  # type: ignore[index]


def test_a_schema_that_cannot_be_compiled_fails_its_line_alone(one: System) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    lines = [said("bad", "abc", response_format=form), said("good", "abc", max_tokens=2)]
    job_id = one.submit(lines)
    assert one.finished(job_id).request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    (failed,) = one.lines(job_id)[1]
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"].startswith("response_format")


def test_completions_echo_their_prompt(one: System, tiny: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answers, failed = run(
        one,
        "/v1/completions",
        {
            "plain": body,
            "echo": body | {"echo": True},
            "scored": body | {"echo": True, "logprobs": 2},
            "suffix": body | {"suffix": "x"},
            "ids": body | {"prompt": AutoTokenizer.from_pretrained(tiny)("hello")["input_ids"]},
            "cut": body | {"prompt": "x" * 5000, "truncate_prompt_tokens": 10},
            "long": body | {"prompt": "x" * 5000},
        },
    )
    assert failed["suffix"]["param"] == "suffix"
    assert failed["long"]["code"] == "context_length_exceeded"
    done = {
        name: Completion.model_validate(each, strict=True)
        for name, each in answers.items()
        if name != "scored"
    }
    text = done["plain"].choices[0].text
    assert done["ids"].choices[0].text == text
    assert done["echo"].choices[0].text == "hello" + text
    assert done["cut"].usage is not None
    assert done["cut"].usage.prompt_tokens == 10
    scored = answers["scored"]["choices"][0]
    assert scored["text"] == "hello" + text
    # The package's types do not know that the first token has no probability; the API does it so.
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert all(value <= 0 for value in scored["logprobs"]["token_logprobs"][1:])
    assert len(scored["logprobs"]["token_logprobs"]) == 9
    assert "".join(scored["logprobs"]["tokens"]) == scored["text"]


def test_embeddings_are_those_of_a_plain_forward(one: System, tiny: Path) -> None:
    texts = ["hello", "a much longer text than that " * 5, "hi"]
    answers, failed = run(
        one,
        "/v1/embeddings",
        {
            "single": {"input": texts[0]},
            "several": {"input": texts},
            "encoded": {"input": texts, "encoding_format": "base64"},
            "short": {"input": texts[0], "dimensions": 8},
            "wide": {"input": texts[0], "dimensions": 10_000},
            "long": {"input": ["ok", "x" * 5000]},
            "cut": {"input": "x" * 5000, "truncate_prompt_tokens": 20},
        },
    )
    assert failed["wide"]["param"] == "dimensions"
    assert failed["long"]["param"] == "input[1]"
    done = {
        name: CreateEmbeddingResponse.model_validate(answers[name]) for name in answers if name != "encoded"
    }
    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    with torch.inference_mode():
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        exact = [
            torch.nn.functional.normalize(model.model(each).last_hidden_state[0, -1], dim=0) for each in ids
        ]
    for each, expected in zip(done["several"].data, exact, strict=True):
        assert each.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    assert done["single"].data[0].embedding == pytest.approx(exact[0].tolist(), abs=1e-4)
    cut = exact[0][:8] / exact[0][:8].norm()
    assert done["short"].data[0].embedding == pytest.approx(cut.tolist(), abs=1e-4)
    assert done["cut"].usage.prompt_tokens == 20
    for data, expected in zip(answers["encoded"]["data"], exact, strict=True):
        packed = base64.b64decode(data["embedding"])
        assert struct.unpack(f"<{len(packed) // 4}f", packed) == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_schema_that_would_end_the_worker_is_its_own_lines_fault(one: System) -> None:
    chain = {str(step): {"$ref": f"#/$defs/{step + 1}"} for step in range(9_000)} | {"9000": {}}
    schema = {"$ref": "#/$defs/0", "$defs": chain}
    kept = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answers, failed = run(
        one, "/v1/chat/completions", {"good": kept, "bad": kept | {"response_format": form}}
    )
    assert list(answers) == ["good"]
    assert failed["bad"]["param"] == "response_format"
