"""Groups that some request cannot do without: for room, or because it is urgent."""

from collections.abc import Callable, Sequence

from flying_serving.controller.requests import RequestState
from flying_serving.policy.snapshot import Need


def needs_of(
    begins: Sequence[RequestState],
    urgent: int,
    sizes: Sequence[int],
    engines: int,
    needs_loan: Callable[[RequestState], bool],
) -> list[Need]:
    """What a layout must have.

    A long request needs its group from when it is its turn until its prompt is done: then the group may drain, or is
    kept to its end (`snapshot.LATER`). While others wait that came before it, it could not begin there. An urgent one
    needs to its end the widest group that leaves engines to everyone else, or the widest there is.

    Args:
        begins: the request whose turn it is, and those whose prompts are not done.
        urgent: how many urgent ones there are.
        sizes: of groups that can be formed now, narrow first: nobody needs what cannot be.
        engines: of the server.
        needs_loan: whether a request needs weights to be lent, which only a group of the layout does.
    """
    needs = []
    least = [one.sizes[0] for one in begins if one.spec.degree is None or needs_loan(one)]
    longest = max(filter(sizes.__contains__, least), default=sizes[0])
    if longest > sizes[0]:
        reason = f"context: a request needs {longest} engines"
        needs.append(Need(longest, urgent=False, reason=reason, lends=any(map(needs_loan, begins))))
    if urgent:
        leaving_room = [size for size in sizes if size <= engines // 2]
        size = leaving_room[-1] if engines > 2 and leaving_room else sizes[-1]
        needs.append(Need(size, urgent=True, reason=f"priority: {urgent} urgent requests"))
    return needs
