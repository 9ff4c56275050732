"""Which requests of the old layout go on in the new one, and which engines take part in the migration of their KV."""

from collections import Counter
from collections.abc import Iterable

from flying_serving.controller.commands import Command, Dispatch
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Group, Layout, enclosing_group


def to_migrate(
    old: Iterable[RequestState], layout: Layout, settings: Settings, *, streams: bool
) -> list[tuple[RequestState, Group | None]]:
    """Of requests in groups that `layout` lacks: prompts that their group has not come to; or with `streams` all.

    Beside each the group that has its KV: one that was not begun has some only if that came with it. Those that ask for
    a degree, that may not move or that no group of `layout` holds stay.
    """
    begun: Counter[Group] = Counter()
    sizes = {len(group) for group in layout.groups}
    found = []
    for state in old:
        assert state.group is not None
        early = state.prefill_tokens > 0 and begun[state.group] >= settings.limits.max_num_batched_tokens
        begun[state.group] += state.prefill_tokens  # perhaps in the step under way, or in the last one
        spec = state.spec
        fits = spec.degree is None and sizes.intersection(state.fitting(settings.capacity.tokens))
        if fits and (early or (streams and spec.can_migrate)):
            found.append((state, state.kv_group if early else state.group))
    return found


def announcements(
    commands: Iterable[Command], sizes: Iterable[int], awaiting: Iterable[int] = ()
) -> dict[int, tuple[int, int]]:
    """For each engine concerned: requests that migrate to it, and `MigrateKV` messages that it gets.

    `commands` are given together, groups have `sizes`, and engines `awaiting` an announcement get one even of nothing.
    """
    migrations = [(one.migrated_from, one.group) for one in commands if isinstance(one, Dispatch) and one.migrated_from]
    arrivals = Counter(target[0] for _, target in migrations)
    messages: Counter[int] = Counter()
    for source, target in set(migrations):
        messages.update(enclosing_group(source, target, sizes) or ())
    return {engine: (arrivals[engine], messages[engine]) for engine in sorted({*messages, *awaiting})}
