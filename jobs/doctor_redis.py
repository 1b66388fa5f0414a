"""Whether Redis can be trusted with a ledger: that it answers, evicts nothing, keeps what it has."""

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import redis

from jobs.doctor_findings import Finding, Look
from jobs.masking import without_password
from jobs.settings import Settings

_look = Look("redis")
_SECONDS = 3.0
_OLDEST = (6, 2)
_SLOW_MS, _SKEW_SECONDS, _FULL = 10.0, 2.0, 0.8
_ADVICE = {
    redis.AuthenticationError: "The password or the user in LONGHAUL_REDIS_URL is wrong, or is missing.",
    redis.TimeoutError: "Nothing is there: check host and port in LONGHAUL_REDIS_URL, and firewalls.",
    redis.ConnectionError: "Start it, or correct LONGHAUL_REDIS_URL ('longhaul up' starts one of its own).",
    redis.BusyLoadingError: "It is loading its data: wait.",
}

_HANGS = "It hangs: it is stopped, swaps, or is in a slow command (see its log). Restart it if it stays so."


def check(settings: Settings) -> Iterator[Finding]:
    """Look at the Redis of the settings."""
    shown = without_password(settings.redis_url)
    client = redis.Redis.from_url(
        settings.redis_url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS, decode_responses=True
    )
    with client:
        try:
            client.ping()
        except redis.RedisError as error:
            yield _unreachable(shown, error)
            return
        yield _round_trip(client, shown)
        try:
            info: dict[str, Any] = client.info()
        except redis.RedisError as error:  # a managed one may not let everybody ask
            yield _look.unchecked("facts", f"INFO is refused: {error}", "Let this user run INFO.")
            return
        yield from facts(info, settings.feed_budget_bytes)
        yield _clock(client)
        yield _writes(client, settings.namespace)


def _unreachable(url: str, error: redis.RedisError) -> Finding:
    hangs = isinstance(error, redis.TimeoutError) and "connecting" not in str(error)
    answered = hangs or isinstance(error, redis.AuthenticationError | redis.BusyLoadingError)
    if "LONGHAUL_REDIS_URL" not in os.environ and not answered:
        said = f"LONGHAUL_REDIS_URL is not set, and none answers at {url}"
        return _look.unchecked("reachable", said, "Set it on machines that run servers, or say --dir.")
    # Subclasses first: a wrong password is a connection error to this client.
    kinds = sorted(_ADVICE, key=lambda kind: -len(kind.__mro__))
    advice = next((_ADVICE[kind] for kind in kinds if isinstance(error, kind)), "See the message.")
    if hangs:
        said = f"{url} takes connections, and does not answer within {_SECONDS:g} s"
        return _look.wrong("reachable", said, _HANGS)
    return _look.wrong("reachable", f"{url}: {error}", advice)


def _round_trip(client: Any, url: str) -> Finding:
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        client.ping()
        taken.append((time.perf_counter() - began) * 1000)
    median = statistics.median(taken)
    said = f"{url} answers in {median:.1f} ms"
    if median > _SLOW_MS:
        is_here = urlsplit(url).hostname in (None, "localhost", "127.0.0.1", "::1")
        advice = "This machine has too much to do." if is_here else "Have it nearer."
        return _look.warning("reachable", said, f"Each step of a job asks it. {advice}")
    return _look.ok("reachable", said)


def facts(info: dict[str, Any], fed_bytes: int) -> Iterator[Finding]:
    """Judge what INFO tells; `fed_bytes` is how much of prompts may be in it."""
    yield _version(info)
    yield from _kind(info)
    yield _eviction(info)
    yield from _kept(info)
    yield _memory(info, fed_bytes)


def _version(info: dict[str, Any]) -> Finding:
    version = str(info.get("redis_version", "?"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _OLDEST:
        return _look.wrong("version", version, "Longhaul needs 6.2 or later.")
    return _look.ok("version", version)


def _kind(info: dict[str, Any]) -> Iterator[Finding]:
    if info.get("cluster_enabled"):
        yield _look.wrong("kind", "it is a cluster", "Use one that is not (docs: one Redis, no cluster).")
    if info.get("role") in ("slave", "replica"):
        yield _look.wrong("kind", "it is a replica", "Name the primary in LONGHAUL_REDIS_URL.")


def _eviction(info: dict[str, Any]) -> Finding:
    policy = str(info.get("maxmemory_policy", ""))
    if not policy:
        return _look.unchecked("eviction", "it does not tell its policy", "It must be noeviction.")
    if policy != "noeviction":
        advice = "It may throw requests away: CONFIG SET maxmemory-policy noeviction, and in its settings."
        return _look.wrong("eviction", policy, advice)
    return _look.ok("eviction", policy)


def _kept(info: dict[str, Any]) -> Iterator[Finding]:
    if "aof_enabled" not in info:
        yield _look.unchecked("persistence", "it does not tell", "Its append-only file should be on.")
    elif not info["aof_enabled"]:
        advice = "After a restart jobs are brought back from the store, which takes time: appendonly yes."
        yield _look.warning("persistence", "the append-only file is off", advice)
    else:
        yield _look.ok("persistence", "the append-only file is on")
    for name, what in {"aof_last_write_status": "append", "rdb_last_bgsave_status": "snapshot"}.items():
        if info.get(name, "ok") != "ok":
            advice = "Its disk is full or broken, and it may refuse writes: see its log."
            yield _look.wrong("persistence", f"its last {what} failed", advice)


def _memory(info: dict[str, Any], fed_bytes: int) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    room = limit or int(info.get("total_system_memory", 0))
    said = f"{used / 1e6:,.0f} MB used of {room / 1e6:,.0f} MB" + (
        "" if limit else ", which is the machine's"
    )
    if room and used > _FULL * room:
        advice = "When it is full no job is taken: give it more (maxmemory), or wait for jobs to end."
        return _look.warning("memory", said, advice)
    if limit and fed_bytes > limit / 2:
        advice = f"LONGHAUL_FEED_BUDGET_BYTES ({fed_bytes / 1e6:,.0f} MB) is more than half: lower it."
        return _look.warning("memory", said, advice)
    return _look.ok("memory", said)


def _clock(client: Any) -> Finding:
    began = time.time()
    seconds, micros = client.time()
    theirs = int(seconds) + int(micros) / 1e6
    return skew(_look, theirs - (began + time.time()) / 2)


def skew(look: Look, seconds: float) -> Finding:
    """Judge how far another clock is ahead of this machine's."""
    ahead = f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    if abs(seconds) > _SKEW_SECONDS:
        return look.warning("clock", ahead, "Deadlines and expiry go wrong by as much: run NTP on both.")
    return look.ok("clock", f"within {max(0.1, abs(seconds)):.1f} s of this machine's")


def _writes(client: Any, namespace: str) -> Finding:
    key = f"{{{namespace}}}:doctor"
    try:
        client.set(key, "1", px=5000)
        client.delete(key)
        client.eval("return redis.call('TIME')", 0)
    except redis.RedisError as error:
        return _look.wrong(
            "writes", str(error), "This user must write and run Lua; a full Redis refuses too."
        )
    return _look.ok("writes", "it writes and runs scripts")
