"""From a body to the parameters and token ids that are planned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit import planning
from tests.unit.planning import EMBED, TEXT, Planned, Planning, body_line, line

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
JSON = {"type": "json_object"}
With = Callable[..., Planning]


@pytest.fixture
def planned_with(tmp_path: Path, tokenizer_dir: Path) -> With:
    """Plans with one of the test templates: `planned_with("qwen3")(data)`."""

    def made(name: str, **model: Any) -> Planning:
        path = str(planning.TEMPLATES / f"{name}.jinja")
        return Planning(tmp_path, tokenizer_dir, chat_template=path, **model)

    return made


def _refusal(found: Planned, custom_id: str = "a") -> tuple[str, str]:
    error = found.refusals()[custom_id]
    return error["param"], error["message"]


def test_a_bias_outside_the_vocabulary_is_refused(planned: Planning) -> None:
    most = planned.tokenizer().vocabulary
    found = planned(line("a", logit_bias={str(most): 1}) + line("b", logit_bias={str(most - 1): 1}))
    assert _refusal(found)[0] == "logit_bias"
    assert found.named("b").params["logit_bias"] == [[most - 1, 1.0]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
        ({"messages": [{"role": "user", "content": "x"}, CALLED]}, "messages[1].tool_calls"),
    ],
)
def test_what_the_template_would_not_look_at_is_refused(
    planned: Planning, body: dict[str, Any], param: str
) -> None:
    assert _refusal(planned(line("a", **body)))[0] == param


def test_the_first_fault_of_a_body_is_the_one_it_is_refused_for(planned_with: With) -> None:
    twice = {"role": "assistant", "tool_calls": CALLED["tool_calls"] * 2}
    wrong = {"messages": [{"role": "user", "content": "x"}, twice]}
    data = line("bias", logit_bias={"99999": 1}, reasoning_effort="low", **wrong)
    data += line("unknown", reasoning_effort="low", **wrong) + line("refused", **wrong) + line("good")
    found = planned_with("llama3")(data)
    params = {name: error["param"] for name, error in found.refusals().items()}
    assert params == {"bias": "logit_bias", "unknown": "reasoning_effort", "refused": "messages"}
    assert found.named("good").row == 3


def test_tools_that_must_not_be_called_need_no_format(planned: Planning) -> None:
    found = planned(line("a", tools=[TOOL], tool_choice="none", temperature=0) + line("b", temperature=0))
    assert found.requests[0].followers == [[1, "b"]]


def test_reasoning_effort_is_a_variable_of_the_template(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = tmp_path / "effort.jinja"
    path.write_text("{{ reasoning_effort }}:{{ messages[0].content }}")
    planned = Planning(tmp_path, tokenizer_dir, chat_template=str(path))
    other = {"reasoning_effort": "high"}
    data = line("a", reasoning_effort="low") + line("b", chat_template_kwargs={"reasoning_effort": "low"})
    data += line("c", reasoning_effort="low", chat_template_kwargs=other)
    found = planned(data)
    for name in "ab":
        assert planned.tokenizer().decode(found.named(name).prompt_ids) == "low:hi"
    assert _refusal(found, "c")[0] == "reasoning_effort"


def test_an_answer_says_how_it_is_taken_apart(planned_with: With) -> None:
    data = line("plain") + line("tools", tools=[TOOL]) + line("one", tools=[TOOL], parallel_tool_calls=False)
    qwen = planned_with("qwen3")(data)
    assert qwen.named("plain").params["answer"] == {"reasoning": "closed"}
    assert qwen.named("tools").params["answer"] == {"reasoning": "closed", "tools": "hermes"}
    assert qwen.named("one").params["answer"] == {"reasoning": "closed", "tools": "hermes", "parallel": False}


def test_an_answer_of_a_model_that_does_not_think_has_calls_alone(planned_with: With) -> None:
    llama = planned_with("llama3")(line("plain") + line("tools", tools=[TOOL]))
    assert "answer" not in llama.named("plain").params
    assert llama.named("tools").params["answer"] == {"tools": "llama"}


def test_reasoning_that_the_prompt_begins_is_open(planned_with: With) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    data = line("plain") + line("goes on", messages=said, continue_final_message=True)
    found = planned_with("deepseek_r1")(data)
    assert found.named("plain").params["answer"] == {"reasoning": "open"}
    assert found.named("goes on").params["answer"] == {"reasoning": "closed"}


def test_a_continued_message_is_the_end_of_the_prompt(planned: Planning) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon"}]
    found = planned(line("a", messages=said, continue_final_message=True) + line("b", messages=said))
    decode = planned.tokenizer().decode
    assert decode(found.named("a").prompt_ids).endswith("Once upon")
    assert decode(found.named("b").prompt_ids).endswith("assistant\n")
    found = planned(line("c", messages=said, add_generation_prompt=False))
    assert decode(found.named("c").prompt_ids).endswith("Once upon\n")


def test_an_answer_of_a_form_has_a_grammar(planned_with: With) -> None:
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    data = line("json", response_format=JSON) + line("required", tools=[TOOL], tool_choice="required")
    data += line("schema", response_format={"type": "json_schema", "json_schema": schema})
    data += line("named", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})
    data += line("free") + line("text", response_format={"type": "text"})
    found = planned_with("qwen3")(data)
    for name in ("json", "required", "schema", "named"):
        assert isinstance(found.named(name).params["grammar"], str)
    assert "grammar" not in found.named("free").params | found.named("text").params


@pytest.mark.parametrize("most", [1, 5, 2000])
def test_a_truncated_prompt_keeps_its_last_tokens(planned: Planning, most: int) -> None:
    data = line("whole", "abcdefgh") + line("cut", "abcdefgh", truncate_prompt_tokens=most)
    found = planned(data)
    assert found.named("cut").prompt_ids == found.named("whole").prompt_ids[-most:]
    ids = list(range(1, 9))
    found = planned(body_line(TEXT, "a", prompt=ids, truncate_prompt_tokens=most), TEXT)
    assert found.named("a").prompt_ids == ids[-most:]


def test_a_long_prompt_can_be_truncated_to_what_fits(planned: Planning) -> None:
    data = line("refused", "x" * 3000) + line("fits", "x" * 3000, truncate_prompt_tokens=-1)
    data += line("short", "x", truncate_prompt_tokens=-1)
    data += line("over", "x" * 3000, truncate_prompt_tokens=2047)
    data += line("open", "x" * 3000, truncate_prompt_tokens=-1, max_tokens=None)
    found = planned(data)
    assert found.refusals().keys() == {"refused", "over", "open"}
    assert found.refusals()["open"]["param"] == "truncate_prompt_tokens"
    assert (len(found.named("fits").prompt_ids), found.named("fits").params["max_tokens"]) == (2044, 4)
    assert len(found.named("short").prompt_ids) < 100
    found = planned(line("all", "x", truncate_prompt_tokens=-1, max_tokens=2048))
    assert found.refusals()["all"]["code"] == "context_length_exceeded"


def test_each_input_is_embedded_and_the_longest_decides_the_bucket(planned: Planning) -> None:
    data = body_line(EMBED, "one", input="abc") + body_line(EMBED, "ids", input=[[7, 8], [9]])
    data += body_line(EMBED, "long", input=["a", "b" * 500], dimensions=3, encoding_format="base64")
    found = planned(data, EMBED)
    encode = planned.tokenizer().encode_prompts
    assert found.named("one").params == {"encoding": "float"}
    assert [found.named("one").prompt_ids] == encode(["abc"])
    assert found.named("ids").prompt_ids == [7, 8]
    assert found.named("ids").params["inputs"] == [[9]]
    long = found.named("long")
    assert [long.prompt_ids, *long.params["inputs"]] == encode(["a", "b" * 500])
    assert (long.params["dimensions"], long.params["encoding"], long.bucket) == (3, "base64", 512)
    assert found.requests[0] is long


def test_equal_embedding_requests_run_once(planned: Planning) -> None:
    data = body_line(EMBED, "a", input=["x", "y"]) + body_line(EMBED, "b", input=["x", "y"], user="me")
    data += body_line(EMBED, "c", input=["x", "z"]) + body_line(EMBED, "d", input=["x"])
    found = planned(data, EMBED)
    assert found.named("a").followers == [[1, "b"]]
    assert {request.custom_id for request in found.requests} == {"a", "c", "d"}


def test_an_input_beyond_the_context_is_refused_unless_truncated(planned: Planning) -> None:
    long = ["a", "x" * 3000]
    data = body_line(EMBED, "long", input=long)
    data += body_line(EMBED, "cut", input=long, truncate_prompt_tokens=-1)
    data += body_line(EMBED, "few", input=["abc", "x"], truncate_prompt_tokens=2)
    data += body_line(EMBED, "ids", input=[[1, 2, 3], [4]], truncate_prompt_tokens=2)
    data += body_line(EMBED, "word", input=[[1], [99999]])
    found = planned(data, EMBED)
    assert (found.refusals()["long"]["code"], _refusal(found, "long")[0]) == (
        "context_length_exceeded",
        "input[1]",
    )
    assert _refusal(found, "word")[0] == "input[1]"
    assert len(found.named("cut").params["inputs"][0]) == 2048
    (abc,) = planned.tokenizer().encode_prompts(["abc"])
    assert found.named("few").prompt_ids == abc[:2]
    assert (found.named("ids").prompt_ids, found.named("ids").params["inputs"]) == ([1, 2], [[4]])


def test_a_shard_of_embeddings_counts_all_inputs(planned: Planning) -> None:
    data = b"".join(body_line(EMBED, f"r{n}", input=[[n]] + [[5] * 2000] * 260) for n in range(4))
    found = planned(data, EMBED)
    assert [len(part) for part in found.shards] == [2, 2]


def test_half_a_surrogate_pair_is_refused_by_the_endpoints_own_parameter(planned: Planning) -> None:
    data = body_line(EMBED, "a", input="@").replace(b"@", b"\\ud83d")
    assert _refusal(planned(data, EMBED))[0] == "input"
