"""Which requests of the old layout go on in the new one, and which engines have to meet for their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flying_serving.controller.commands import Command, Dispatch
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Group, Layout, enclosing_group


def to_move(
    old: Iterable[RequestState], layout: Layout, settings: Settings, *, streams: bool
) -> list[tuple[RequestState, Group | None]]:
    """Of requests in groups that `layout` lacks: prompts that their group has not come to; or with `streams` all.

    Beside each the group that has its KV: one that was not begun has some only if that came with it. Those that ask for
    a degree, that may not move or that no group of `layout` holds stay.
    """
    begun: Counter[Group] = Counter()
    sizes = {len(group) for group in layout.groups}
    found = []
    for tracked in old:
        assert tracked.group is not None
        early = tracked.prefill_tokens > 0 and begun[tracked.group] >= settings.limits.step_tokens
        begun[tracked.group] += tracked.prefill_tokens  # perhaps in the step under way, or in the last one
        wanted = tracked.wanted
        fits = wanted.degree is None and sizes.intersection(tracked.fitting(settings.capacity.tokens))
        if fits and (early or (streams and wanted.movable)):
            found.append((tracked, tracked.kept_in if early else tracked.group))
    return found


def exchanges(
    commands: Iterable[Command], sizes: Iterable[int], awaiting: Iterable[int] = ()
) -> dict[int, tuple[int, int]]:
    """Requests that come to an engine with their KV, and exchanges that it takes part in.

    For each engine that has any, or that awaits word of it.
    """
    moves = [(one.moved_from, one.group) for one in commands if isinstance(one, Dispatch) and one.moved_from]
    arrivals = Counter(target[0] for _, target in moves)
    tickets: Counter[int] = Counter()
    for source, target in set(moves):
        tickets.update(enclosing_group(source, target, sizes) or ())
    return {engine: (arrivals[engine], tickets[engine]) for engine in sorted({*tickets, *awaiting})}
