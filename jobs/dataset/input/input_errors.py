"""Why an input cannot be used, with what to do about it. Most are raised before any work."""

import difflib
import re
from collections.abc import Collection

from jobs import errors

_SHOWN = 100
"""A message lists no more columns than these."""


class InputError(errors.InvalidRequest):
    """{message}"""


class InputMissing(InputError):
    """{place} does not exist."""


class InputEmpty(InputError):
    """{place} has {what}."""


class RowNoDict(InputError):
    """Row {at} of the list is no dict, but of type {type}. Give each its columns: [{{"text": "..."}}, ...]"""


class InputIsOutput(InputError):
    """{place} is in the directory of the output, which takes its place. Give another -o."""


class InputUnknown(InputError):
    """{place} has no suffix that is known. Known: {known}; each but Parquet and Arrow also with {codecs}."""


class InputMixed(InputError):
    """{place} has several formats: {first}, {second}. Name those of one by a glob: {place}/**/*{suffix}"""


class InputUnreadable(InputError):
    """{where} cannot be read: {reason}."""


class InputChanged(InputError):
    """{where} changed while it was being read: {reason}. The same command again runs what is new."""


class SplitMissing(InputError):
    """{place} has several splits: {splits}. Name one of them: {example}"""


class TypesDiffer(InputError):
    """Column {column!r} has other types in {first} and in {second}: {reason}. Convert one of them."""


class ColumnMissing(InputError):
    """There is no column {name!r}.{near} The input has: {known}."""


class OutputMissing(InputError):
    """There is no column {name!r}: with a schema each property has a column: {known}. {advice}."""


class ColumnTwice(InputError):
    """{where} has more than one column named {name!r}. Rename one of them."""


class WhereRefused(InputError):
    """--where {where!r}: {reason}."""


def no_word(template: str, known: Collection[str]) -> str:
    """Return a hint at a column that a template names, but whose name Jinja takes for several words."""
    for name in known:
        if not name.isidentifier() and re.search(rf"{{[{{%][^}}]*(?<![\"']){re.escape(name)}", template):
            return f". A column whose name is no word is written {{{{ row[{name!r}] }}}}"
    return ""


def missing_column(name: str, known: Collection[str]) -> ColumnMissing:
    """Return the error for a column that is not there, with names that look like it."""
    close = difflib.get_close_matches(name, known, 2)
    near = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    more = f" and {len(known) - _SHOWN:,} more" if len(known) > _SHOWN else ""
    return ColumnMissing(name=name, near=near, known=", ".join(list(known)[:_SHOWN]) + more)
