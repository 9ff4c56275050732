"""Requests as the task pool queues them."""

from flying_serving.controller.pool import Kind
from flying_serving.controller.requests import RequestSpec, RequestState

AGING_S = 30.0
KINDS: list[Kind] = [(None, (1, 2)), (None, (2,)), (1, (1,)), (2, (2,))]


def state(
    number: int,
    *,
    kind: Kind = KINDS[0],
    priority: int = 0,
    prompt: int = 10,
    at_s: float = 0.0,
    deadline_s: float | None = None,
) -> RequestState:
    """Return a request that has arrived as number so much."""
    spec = RequestSpec(prompt, prompt + 5, 5, kind[0], priority, deadline_s)
    return RequestState(f"r{number}", spec, kind[1], number, at_s)
