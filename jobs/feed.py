"""Move a job's requests from its plan shards into the Redis queues, never more than a window ahead."""

from jobs.ledger import Ledger, Unit
from jobs.records import PlannedRequest
from jobs.store import ObjectStore

WAIT_SECONDS = 0.5
"""How long a job whose window or whose store of prompts is full waits for its next turn."""


def feed(ledger: Ledger, store: ObjectStore, unit: Unit) -> int:
    """Feed one turn, at most a shard, so that jobs interleave; return how many requests went in.

    Hands the unit back: at once when there is room for more, later when there is none.
    """
    state = ledger.feed_state(unit)
    if state.shard is None or state.room_requests <= 0 or state.room_bytes <= 0:
        ledger.release_unit(unit, WAIT_SECONDS)
        return 0
    with store.open(state.shard) as stream:
        rest = stream.readlines()[state.offset :]
    taken, room = [], state.room_bytes
    for data in rest[: state.room_requests]:
        if room <= 0:
            break
        taken.append(PlannedRequest.from_json(data))
        room -= len(data)
    if not ledger.feed(unit, state.shard, state.offset, taken, last=len(taken) == len(rest)):
        return 0
    ledger.release_unit(unit)
    return len(taken)
