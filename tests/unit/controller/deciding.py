"""Four engines of which all is measured, and requests that wait."""

from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.state import ClusterState
from tests.unit.controller.model_settings import settings
from tests.unit.policy.costs import costs, measured

LONG = RequestSpec(150, 151, 1)
SIZES = (1, 2, 4)


def measured_state(policy: str = "auto", *, dry_run: bool = False) -> ClusterState:
    """Return four engines that are faster alone than in groups, with two requests at most in a
    group.
    """
    state = ClusterState(settings(policy, 4, max_num_seqs=2, dry_run=dry_run))
    state.steps.calibrate(measured(costs(SIZES, fixed=2.0, rest=1.5)))
    return state


def add_waiting(state: ClusterState, name: str, spec: RequestSpec = LONG) -> RequestState:
    """Return a request that is in the task pool now."""
    sizes = state.settings.capacity.sizes(spec)
    request = RequestState(name, spec, sizes, len(state.pool), 0.0)
    state.pool.add(request)
    return request
