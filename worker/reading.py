"""One output as its request wants it read: the text, its reasoning counted, its tokens scored."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jobs import answers, errors
from jobs.answers import logprobs, reasoning, tool_calls
from jobs.records import PlannedRequest
from worker.engine import Completion, TokenLogprobs
from worker.token_text import Measured, TokenText


def choice(
    texts: TokenText,
    request: PlannedRequest,
    completion: Completion,
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
) -> answers.Choice:
    """Return a choice of a generated answer; raises UnusableOutput."""
    answer = request.params.get("answer", {})
    output = _output(texts, request, completion)
    thought = reasoning.split(output.text, answer["reasoning"]).end if "reasoning" in answer else 0
    prompt = texts.measure(request.prompt_ids, texts.typed) if answer.get("echo") else _NOTHING
    scored = None
    if request.params.get("logprobs") is not None:
        scored = _scored(texts, output, completion, len(prompt.text), whole=prompt_logprobs is not None)
        if prompt_logprobs is not None:
            scored = [*_prompt(texts, prompt, request.prompt_ids, prompt_logprobs), *scored]
    return answers.Choice(
        text=prompt.text + output.text,
        finish_reason=completion.finish_reason,
        tokens=len(completion.token_ids),
        reasoning_tokens=len(output.measured.before(thought)),
        scores=scored,
    )


_NOTHING = Measured("", [], [0])


@dataclass(frozen=True)
class _Output:
    """The text of a completion, and the measure of all of its tokens, also of those the text lacks."""

    text: str
    measured: Measured
    continues: bool


def _output(texts: TokenText, request: PlannedRequest, completion: Completion) -> _Output:
    """Return the output with the markers that parsers look for, and with the space that follows a prompt."""
    shown = _shown(texts, request)
    continues = request.endpoint == answers.COMPLETIONS and any(
        id not in texts.special for id in request.prompt_ids
    )
    measured = texts.measure(completion.token_ids, shown, continues)
    seen = texts.measure(completion.token_ids) if shown or (continues and texts.strips) else measured
    return _Output(_kept(completion.text, seen, measured), measured, continues)


def _shown(texts: TokenText, request: PlannedRequest) -> Collection[int]:
    """Return the special tokens that must be in the text: its answer is parsed by them."""
    answer = request.params.get("answer", {})
    markers = reasoning.MARKERS if "reasoning" in answer else ()
    if "tools" in answer:
        markers = (*markers, *tool_calls.FORMATS[answer["tools"]].markers)
    return [id for id, name in texts.special.items() if name in markers] if markers else ()


def _kept(text: str, seen: Measured, measured: Measured) -> str:
    """Return the measured text, cut where the engine cut the one it saw at a stop string."""
    if seen is measured or not seen.text.startswith(text):
        return text
    if seen.text == text:
        return measured.text
    kept = seen.before(len(text))
    after = kept[-1] + 1 if kept else 0
    return measured.text[: measured.starts[after] - (seen.starts[after] - len(text)) if kept else 0]


def _scored(
    texts: TokenText, output: _Output, completion: Completion, offset: int, whole: bool
) -> list[logprobs.Token]:
    """Score the tokens that are in the text. `whole`: all, as many as the usage counts."""
    if completion.logprobs is None:
        raise errors.UnusableOutput(what="no log probabilities")
    measured = output.measured
    places = range(len(completion.token_ids)) if whole else measured.before(len(output.text))
    scored = []
    for place in places:
        start = offset + min(measured.starts[place], len(output.text))
        scored.append(_token(texts, completion.logprobs[place], measured, place, start, output.continues))
    return scored


def _prompt(
    texts: TokenText, prompt: Measured, ids: Sequence[int], scores: Sequence[TokenLogprobs | None]
) -> list[logprobs.Token]:
    """Score all tokens of a prompt, also its special ones; the first has no score."""
    scored = []
    for place, (id, score) in enumerate(zip(ids, scores, strict=True)):
        start = prompt.starts[place]
        if score is None:
            scored.append(logprobs.Token(prompt.pieces[place] or texts.piece(id), None, offset=start))
        else:
            scored.append(_token(texts, score, prompt, place, start))
    return scored


def _token(
    texts: TokenText, score: TokenLogprobs, text: Measured, place: int, offset: int, continues: bool = False
) -> logprobs.Token:
    """Return a scored token. What a first token lacks of its bytes, those beside it lack too."""
    begins = not continues and place <= text.first
    piece = texts.first_piece if begins else texts.piece
    data = text.pieces[place] or piece(score.token_id)
    top = tuple(
        logprobs.Token(data if id == score.token_id else piece(id), logprob) for id, logprob in score.top
    )
    return logprobs.Token(data, score.logprob, top, offset)
