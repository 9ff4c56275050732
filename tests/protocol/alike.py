"""States of an engine that behave alike are one: what can make no difference is forgotten, or called by one name."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tests.protocol.doubles import NOW_S, PAUSE_S, TICK_S

if TYPE_CHECKING:
    from tests.protocol.engine import Engine

_LOOKED_AT = ("_alone_at", "arbiter", "members", "leaders", "scheduler", "moves", "memory", "overdue")
_SEEN_ELSEWHERE = frozenset(
    {"pool", "_scheduler", "_pool", "_own", "_channel", "kv_cache_manager", "mobile"}
    | {"_led", "_block_tokens", "_members", "_rpc", "_admit", "_lacks"}
)


def key_of(engine: Engine) -> Any:
    """Return all that matters of a state, as one hashable value."""
    return (engine.engine, *(freeze(getattr(engine, name)) for name in _LOOKED_AT))


def freeze(thing: Any) -> Any:
    """Return a thing and all that it holds as one hashable value; equal things have equal values."""
    if thing is None or isinstance(thing, str | int | float):
        return thing
    if isinstance(thing, dict):
        return tuple(sorted((freeze(key), freeze(value)) for key, value in thing.items()))
    if isinstance(thing, set | frozenset):
        return tuple(sorted(map(freeze, thing)))
    if isinstance(thing, list | tuple | deque):
        return tuple(map(freeze, thing))
    if hasattr(thing, "tobytes"):
        return thing.tobytes()
    return tuple((name, freeze(value)) for name, value in sorted(vars(thing).items()) if name not in _SEEN_ELSEWHERE)


def forget_times(engine: Engine) -> None:
    """Forget how long ago things were, as far as it makes no difference."""
    arbiter = engine.arbiter
    arbiter._present_steps = min(arbiter._present_steps, arbiter.weave_steps)
    arbiter._left_s = max(arbiter._left_s, 0.0)
    arbiter._expect_until = max(arbiter._expect_until, NOW_S)
    engine._alone_at = engine._alone_at if engine._alone_at > NOW_S else 0.0
    # only lanes that are led here are asked for; of those that are late it matters only which came first
    led = [size for size, lane in engine.lanes().items() if lane.has_requests() or not engine.settings.endless]
    arbiter._took_s = {size: took_s for size, took_s in arbiter._took_s.items() if size in led}
    ages = {size: NOW_S - at for size, at in arbiter._stepped_at.items() if size in led}
    if engine.settings.exact:
        late = sorted({age for age in ages.values() if age >= PAUSE_S})
        ranks = {age: PAUSE_S + rank for rank, age in enumerate(late)}
    else:
        ranks = {age: rank / 1024 for rank, age in enumerate(sorted(set(ages.values())))}
        engine.overdue = {}
    arbiter._stepped_at = {size: NOW_S - ranks.get(age, age) for size, age in ages.items()}
    for leader in engine.leaders.values():
        leader._retry_at = max(leader._retry_at, NOW_S)
        leader._ask_at = max(leader._ask_at, NOW_S)
    for member in engine.members.values():
        member._needed_at = max(member._needed_at, NOW_S - TICK_S)
    engine._last_step_s = (0.0, 0.0)
    _forget_moves(engine)


def _forget_moves(engine: Engine) -> None:
    """Any of their waits may be over at any time: see `Late`. What was counted decides nothing."""
    moves = engine.moves
    moves.moved = moves.moved_tokens = moves.prefilled_again = 0
    for waiting in (*moves._waiting, *moves._coming.values(), *moves._retained.values()):
        waiting.since_s = NOW_S


def rename_blocks(engine: Engine) -> None:
    """Number physical blocks in the order in which they are found: engines speak of group blocks.

    But not always: of those for KV that comes to the engine's own lane a ticket is under way.
    """
    lent = [member.lent for member in engine.members.values()]
    requests = [engine.scheduler.requests[name] for name in sorted(engine.scheduler.requests)]
    retained = [one for _, one in sorted(engine.moves._retained.items()) if one.size == 1]
    told = {b for arrival in engine.moves._coming.values() if arrival.size == 1 for b in arrival.request.blocks}
    found = [books.table[v] for books in lent for v in sorted(books.table)]
    found += [block for books in lent for block in books.offered]
    found += [block for holder in (*requests, *retained) for block in holder.blocks]
    found += engine.scheduler.pool.free
    others = [block for block in dict.fromkeys(found) if block and block not in told]
    numbers = (number for number in range(1, engine.settings.blocks) if number not in told)
    new = {block: block for block in (0, *told)} | dict(zip(others, numbers, strict=False))
    for books in lent:
        books.table = {v: new[books.table[v]] for v in sorted(books.table)}
        books.offered = [new[block] for block in books.offered]
    for holder in (*requests, *retained):
        holder.blocks = [new[block] for block in holder.blocks]
    engine.own._pinned = [[new[block] for block in blocks] for blocks in engine.own._pinned]
    engine.scheduler.pool.rename(new)
    engine.memory.rename(new, engine.scheduler.pool.free)
