"""The choice of requests of the old layout that go on in the new one."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Group, Layout


class Leaving(NamedTuple):
    """A request that leaves its group. `has_kv`: the group has KV of it, or it came with KV."""

    request: RequestState
    has_kv: bool


def to_migrate(
    old: Iterable[RequestState], layout: Layout, settings: Settings, *, begun: bool
) -> list[Leaving]:
    """Return the requests that leave their groups, of requests in groups that `layout` lacks.

    Prompts leave that their group has not begun. With `begun` all requests leave that can migrate.
    A request stays if it asks for a degree, may have killed engines, or has no room in any group of
    `layout`.
    """
    ahead_tokens: Counter[Group] = Counter()
    sizes = {len(group) for group in layout.groups}
    leaving = []
    for request in old:
        assert request.group is not None
        is_step_full = ahead_tokens[request.group] >= settings.limits.max_num_batched_tokens
        is_unbegun = request.prefill_tokens > 0 and is_step_full
        # perhaps in the step under way, or in the last one
        ahead_tokens[request.group] += request.prefill_tokens
        spec = request.spec
        may_leave = spec.degree is None and not request.is_suspect
        fits = may_leave and sizes.intersection(request.fitting(settings.capacity.kv_tokens))
        if fits and (is_unbegun or (begun and spec.can_migrate)):
            leaving.append(Leaving(request, has_kv=not is_unbegun or request.kv is not None))
    return leaving
