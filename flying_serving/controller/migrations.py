"""Which requests of the old layout go on in the new one."""

from collections import Counter
from collections.abc import Iterable

from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Group, Layout


def to_migrate(
    old: Iterable[RequestState], layout: Layout, settings: Settings, *, streams: bool
) -> list[tuple[RequestState, bool]]:
    """Of requests in groups that `layout` lacks: prompts that their group has not come to; or with `streams` all.

    Beside each whether there is KV of it: of one that was not begun, only if that came with it. Those that ask for a
    degree, that may not move, that may have killed engines or that no group of `layout` holds stay.
    """
    begun: Counter[Group] = Counter()
    sizes = {len(group) for group in layout.groups}
    found = []
    for state in old:
        assert state.group is not None
        early = state.prefill_tokens > 0 and begun[state.group] >= settings.limits.max_num_batched_tokens
        begun[state.group] += state.prefill_tokens  # perhaps in the step under way, or in the last one
        spec = state.spec
        may_leave = spec.degree is None and not state.is_suspect
        fits = may_leave and sizes.intersection(state.fitting(settings.capacity.tokens))
        if fits and (early or (streams and spec.can_migrate)):
            found.append((state, not early or state.kv is not None))
    return found
