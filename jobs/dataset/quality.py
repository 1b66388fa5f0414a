"""Filters over outputs: lengths and regular expressions, each refusal counted by its reason.

Expressions are RE2's, which takes time linear in the text whatever the expression; so there are no
lookarounds and no backreferences.
"""

from collections import Counter

import re2

from jobs import errors


class BadExpression(errors.LonghaulError):
    """{option} {pattern!r} is no regular expression of RE2: {reason}. See https://github.com/google/re2/wiki/Syntax."""


class BadLengths(errors.LonghaulError):
    """No output can have {option} {length} characters{other}: choose lengths that some text has."""


class Filters:
    """Tells which outputs to leave out, and counts them.

    Lengths are in characters (code points), both inclusive. `match` must be found somewhere in the text,
    `reject` nowhere. Raises BadExpression and BadLengths.
    """

    def __init__(
        self,
        min_chars: int | None = None,
        max_chars: int | None = None,
        match: str | None = None,
        reject: str | None = None,
    ) -> None:
        _check_lengths(min_chars, max_chars)
        self._least, self._most = min_chars or 0, max_chars
        self._match = _compiled("--match", match)
        self._reject = _compiled("--reject", reject)
        self.counts: Counter[str] = Counter()

    def reason(self, text: str) -> str | None:
        """Return the option that refuses a text, or None; the first of them in the order of the class."""
        found = self._reason(text)
        if found is not None:
            self.counts[found] += 1
        return found

    def _reason(self, text: str) -> str | None:
        if len(text) < self._least:
            return "min-chars"
        if self._most is not None and len(text) > self._most:
            return "max-chars"
        if self._match is None and self._reject is None:
            return None
        encoded = text.encode("utf-8", "replace")
        if self._match is not None and not self._match.search(encoded):
            return "match"
        return "reject" if self._reject is not None and self._reject.search(encoded) else None


def _check_lengths(least: int | None, most: int | None) -> None:
    for option, length in (("--min-chars", least), ("--max-chars", most)):
        if length is not None and length < 0:
            raise BadLengths(option=option, length=length, other="")
    if least is not None and most is not None and least > most:
        raise BadLengths(option="--min-chars", length=least, other=f" and --max-chars {most}")


def _compiled(option: str, pattern: str | None) -> "re2._Regexp | None":
    if pattern is None:
        return None
    options = re2.Options()
    options.log_errors = False
    try:
        # Bytes in and out: RE2 works on UTF-8, and translating places in the text costs more than the search.
        return re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0]
        shown = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else error
        raise BadExpression(option=option, pattern=pattern, reason=shown) from None
