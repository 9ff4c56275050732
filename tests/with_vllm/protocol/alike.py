"""States of an engine that behave alike are one: what can make no difference is forgotten, or
called by one name.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any

from flying_serving.engine.block_lending import RECALL_WAIT_S
from tests.with_vllm.protocol.doubles import NOW_S, PAUSE_S, TICK_S

if TYPE_CHECKING:
    from tests.with_vllm.protocol.engine import Engine

_SEEN_ELSEWHERE = frozenset(
    {"pool", "scheduler", "_pool", "_own", "_channel", "kv_cache_manager", "mobile"}
    | {"_lanes", "_host", "_pools", "_sizes", "_incoming", "_source", "_pull_part"}
    | {
        "hooks",
        "cached_tokens",
        "hit_tokens",
        "forgotten",
        "_table",
        "_offers",
        "token_s",
        "_show",
        "_arrivals",
        "source_tokens",
    }
)


def key_of(engine: Engine) -> Any:
    """Return all that matters of a state, as one hashable value."""
    loop = engine.loop
    parts = (
        loop._lane_1_ready_at_s,
        loop.arbiter,
        loop.block_lending,
        loop.lanes.members,
        loop.lanes.leaders,
        loop.lanes.schedulers,
    )
    weights = ()
    if engine.weights is not None:
        ledger = engine.weights.ledger
        weights = (
            ledger.dropped,
            ledger.blocks,
            engine.weights.told,
            frozenset(loop.lanes.own_pool.withheld),
        )
    samples = (loop.sampled._checksums, engine.samples) if engine.settings.diverging else ()
    parts = (*parts, loop.migrations, engine.table, engine.memory, engine.overdue, weights, samples)
    return (engine.number, *map(freeze, parts))


def freeze(thing: Any) -> Any:
    """Return a thing and all that it holds as one hashable value; equal things have equal
    values.
    """
    if thing is None or isinstance(thing, str | int | float | range):
        return thing
    if isinstance(thing, Enum):
        return thing.name
    if isinstance(thing, dict):
        return tuple(sorted((freeze(key), freeze(value)) for key, value in thing.items()))
    if isinstance(thing, set | frozenset):
        return tuple(sorted(map(freeze, thing)))
    if isinstance(thing, list | tuple | deque):
        return tuple(map(freeze, thing))
    if hasattr(thing, "tobytes"):
        return thing.tobytes()
    return tuple(
        (name, freeze(value))
        for name, value in sorted(vars(thing).items())
        if name not in _SEEN_ELSEWHERE
    )


def forget_times(engine: Engine) -> None:
    """Forget how long ago things were, as far as it makes no difference."""
    loop, arbiter = engine.loop, engine.loop.arbiter
    arbiter._present_steps = min(arbiter._present_steps, arbiter.weave_steps)
    arbiter._slice.left_s = max(arbiter._slice.left_s, 0.0)
    arbiter._hold_until_s = max(arbiter._hold_until_s, NOW_S)
    paused = arbiter._older_paused_until_s > NOW_S
    # it may be over at any time
    arbiter._older_paused_until_s = NOW_S + TICK_S / 2 if paused else 0.0
    loop._lane_1_ready_at_s = loop._lane_1_ready_at_s if loop._lane_1_ready_at_s > NOW_S else 0.0
    lending = loop.block_lending
    if lending._short_since_s is not None:  # lane 1 waits for blocks, or has waited for long enough
        waits = NOW_S - lending._short_since_s < RECALL_WAIT_S
        lending._short_since_s = NOW_S if waits else NOW_S - RECALL_WAIT_S
    # only lanes that are led here are asked for; of those that are overdue it matters only which
    # was so first
    lead = [
        size
        for size, lane in engine.schedulers.items()
        if lane.has_requests() or not engine.settings.endless
    ]
    steps_s = arbiter._slice.step_s.items()
    arbiter._slice.step_s = {size: step_s for size, step_s in steps_s if size in lead}
    ages = {size: NOW_S - at for size, at in arbiter._stepped_at_s.items() if size in lead}
    if engine.settings.exact:
        overdue = sorted({age for age in ages.values() if age >= PAUSE_S})
        ranks = {age: PAUSE_S + rank for rank, age in enumerate(overdue)}
    else:
        ranks = {age: rank / 1024 for rank, age in enumerate(sorted(set(ages.values())))}
        engine.overdue = {}
    arbiter._stepped_at_s = {size: NOW_S - ranks.get(age, age) for size, age in ages.items()}
    for leader in loop.lanes.leaders.values():
        leader._may_step_at_s = max(leader._may_step_at_s, NOW_S)
        leader._may_ask_at_s = max(leader._may_ask_at_s, NOW_S)
    for member in loop.lanes.members.values():
        member._recalled_at_s = max(member._recalled_at_s, NOW_S - TICK_S)
    loop.last_step_s = (0.0, 0.0)
    _forget_migrations(engine)


def _forget_migrations(engine: Engine) -> None:
    """Any of their waits may be over at any time: see `Overdue`. What was counted decides
    nothing.
    """
    source, incoming = engine.loop.migrations.source, engine.loop.migrations.incoming
    incoming._migrated = incoming._migrated_tokens = incoming._prefilled_again = 0
    for retained in source.retained.values():
        retained.idle_since_s = NOW_S
    for arrival in incoming.by_id.values():
        arrival.last_progress_s = NOW_S


def rename_blocks(engine: Engine) -> None:
    """Number physical blocks in the order in which they are found: engines speak of group blocks,
    or of offers.
    """
    own, migrations = engine.schedulers[1], engine.loop.migrations
    lent = {size: member.lent for size, member in engine.loop.lanes.members.items()}
    retained = [one for _, one in sorted(migrations.source.retained.items()) if one.size == 1]
    arrivals = [
        one for _, one in sorted(migrations.incoming.by_id.items()) if one.size == 1 and one.blocks
    ]
    holders = (
        [own.requests[name] for name in sorted(own.requests)]
        + [one.request for one in arrivals]
        + retained
    )
    # an arrival that was pulled ahead has its blocks under another request of the same id
    holders += [request for _, request in sorted(own.kv_cache_manager.ahead.items())]
    holders = list({id(holder): holder for holder in holders}.values())
    found = [books.table[v] for books in lent.values() for v in sorted(books.table)]
    found += [block for books in lent.values() for block in books.reserved]
    found += [block for holder in holders for block in holder.blocks]
    found += own.pool.free
    extra = range(engine.settings.blocks, engine.settings.all_blocks)  # these stay apart
    new = {0: 0} | {block: block for block in extra}
    new |= {
        block: n
        for n, block in enumerate((b for b in dict.fromkeys(found) if b and b not in extra), 1)
    }
    for books in lent.values():
        books.table = {v: new[books.table[v]] for v in sorted(books.table)}
        books.reserved = [new[block] for block in books.reserved]
    for holder in (*holders, *arrivals):
        holder.blocks = [new[block] for block in holder.blocks]
    pool = engine.loop.lanes.own_pool
    pool._pinned = [[new[block] for block in blocks] for blocks in pool._pinned]
    own.pool.rename(new)
    engine.memory.rename(new, own.pool.free)
    engine.memory.touched.intersection_update(extra)
    engine.table.rename(new, {size: books.table for size, books in lent.items()})
