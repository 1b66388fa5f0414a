"""Reasoning: what a model that thinks says before its answer, between <think> and </think>."""

from dataclasses import dataclass

_OPENING, _CLOSING = "<think>", "</think>"
MARKERS = (_OPENING, _CLOSING)


@dataclass(frozen=True)
class Split:
    """A text in its two parts. `reasoning` is None when nothing was thought.

    `end` is how many characters of the whole text are reasoning, up to and with `</think>`.
    """

    reasoning: str | None
    content: str
    end: int


def split(text: str, form: str) -> Split:
    """Split an output. `form`: open (the prompt ends inside <think>), closed (the model begins it, or not).

    Reasoning that does not end is all there is: the content is empty.
    """
    begun = text.lstrip().startswith(_OPENING)
    if form == "closed" and not begun:
        return Split(None, text, 0)
    start = text.index(_OPENING) + len(_OPENING) if begun else 0
    thought, _, content = text[start:].partition(_CLOSING)
    return Split(thought.strip("\n") or None, content.lstrip("\n"), len(text) - len(content))
