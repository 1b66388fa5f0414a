"""What of a command may be published: no keys, no passwords, no signatures of URLs."""

import re
import shlex
from collections.abc import Iterable, Sequence

from jobs import masking

_SECRET_OPTION = re.compile(r"--(api-key|hf-token|[a-z-]*(secret|password)[a-z-]*)")  # not --max-tokens
_SECRET_FIELD = re.compile(
    r"([?&][^=&]*(?:key|token|secret|password|signature|credential|sig)[^=&]*=)[^&]*", re.I
)


def command(arguments: Sequence[str]) -> str:
    """Return a command line to paste into a shell. Options that take secrets are left out."""
    return shlex.join(url(argument) for argument in _without_secrets(arguments))


def url(text: str) -> str:
    """Return a text; if it is a URL, or an option with one, then without what in it is secret."""
    option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://\S+$", value):
        value = _SECRET_FIELD.sub(r"\1***", masking.without_password(value))
    return masking.masked(f"{option}{equals}{value}")


def _without_secrets(arguments: Sequence[str]) -> Iterable[str]:
    waiting = iter(arguments)
    for argument in waiting:
        option, equals, _ = argument.partition("=")
        if not _SECRET_OPTION.fullmatch(option):
            yield argument
        elif not equals:
            next(waiting, None)
