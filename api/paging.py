"""What all lists have in common: limits with the contract's error codes, and the page object."""

from collections.abc import Sequence

from jobs import schema
from jobs.creation import refusal


def checked(limit: int, lowest: int, highest: int) -> int:
    """Return `limit` if it is within its bounds, else raise InvalidRequest."""
    if limit > highest:
        raise refusal(f"limit must be at most {highest}, not {limit}.", "limit", "integer_above_max_value")
    if limit < lowest:
        raise refusal(f"limit must be at least {lowest}, not {limit}.", "limit", "integer_below_min_value")
    return limit


def page(items: Sequence[schema.File | schema.Batch], more: bool) -> schema.Page:
    """Return one page of a list."""
    return schema.Page(
        data=[item.model_dump() for item in items],
        first_id=items[0].id if items else None,
        last_id=items[-1].id if items else None,
        has_more=more,
    )
