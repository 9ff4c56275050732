"""Groups that some request cannot do without: for room, or because it is urgent."""

from collections.abc import Callable, Sequence

from flying_serving.controller.requests import RequestState
from flying_serving.policy.snapshot import Need


def required_groups(
    begins: Sequence[RequestState],
    urgent: int,
    sizes: Sequence[int],
    engines: int,
    needs_loan: Callable[[RequestState], bool],
) -> list[Need]:
    """Return the groups that a layout must have.

    A long request needs its group from when it is its turn until its prompt is done. Then the group
    may drain, or it is kept until the request ends (`snapshot.LATER`). While requests wait that
    came before it, it could not begin there. An urgent request needs a group until it ends: the
    widest that leaves engines to others, or the widest there is.

    Args:
        begins: the request whose turn it is, and requests whose prompts are not done.
        urgent: the number of urgent requests.
        sizes: of groups that can be formed now, narrow first; no other group can be required.
        engines: of the server.
        needs_loan: whether a request needs weights to be lent, which only a group of the layout
            does.
    """
    needs = []
    least_sizes = [
        request.sizes[0] for request in begins if request.spec.degree is None or needs_loan(request)
    ]
    longest = max(filter(sizes.__contains__, least_sizes), default=sizes[0])
    if longest > sizes[0]:
        reason = f"context: a request needs {longest} engines"
        needs.append(Need(longest, urgent=False, reason=reason, lends=any(map(needs_loan, begins))))

    if urgent:
        leaving_room = [size for size in sizes if size <= engines // 2]
        size = leaving_room[-1] if engines > 2 and leaving_room else sizes[-1]
        needs.append(Need(size, urgent=True, reason=f"priority: {urgent} urgent requests"))
    return needs
