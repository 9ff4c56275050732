"""The choice of a group on four engines, whose steps cost the same in all tests."""

from collections.abc import Mapping

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.work import LaneFigures, Objective
from tests.unit.policy.costs import costs

SIZES = (1, 2, 4)
SINGLES = Layout.uniform(4, 1)
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64)
LANES = {size: LaneFigures(cost, 4, 100 * size, 64) for size, cost in costs(SIZES).items()}


def choice(
    limits: Limits = LIMITS, devices: int = 1, tokens: tuple[int, ...] = (100, 200, 400)
) -> GroupChoice:
    """Return the choice of a server of four engines; groups of one, two and four of them hold
    `tokens`.
    """
    capacity = Capacity(dict(zip(SIZES, tokens, strict=True)), devices)
    chosen = Settings(4, capacity, POLICIES["manual"], limits, Objective(10.0))
    return GroupChoice(ClusterState(chosen))


class Filled(Loads):
    """Loads to which a test adds requests."""

    count = 0

    def put(
        self,
        group: Group,
        *,
        tokens: float = 10,
        prompt: int = 10,
        done: bool = True,
        priority: int = 0,
    ) -> None:
        """One that runs in a group, prefilled or not."""
        self.count += 1
        one = RequestState(
            str(self.count), RequestSpec(prompt, prompt, priority=priority), SIZES, self.count, 0.0
        )
        self.add(one, group, tokens)
        if done:
            self.add_tokens(one, 1)


def request(
    prompt: int = 10, sizes: tuple[int, ...] = SIZES, degree: int | None = None, priority: int = 0
) -> RequestState:
    """Return one that waits."""
    return RequestState(
        "new", RequestSpec(prompt, prompt, degree=degree, priority=priority), sizes, 0, 0.0
    )


def choose(
    one: RequestState,
    layout: Layout,
    loads: Loads,
    tokens: float = 20,
    by: GroupChoice | None = None,
    lanes: Mapping[int, LaneFigures] = LANES,
) -> Group | None:
    """Return the group of a request of which `tokens` are expected, beside these loads."""
    chooses = by or choice()
    chooses.state.loads = loads
    return chooses.choose(one, layout, lanes, tokens)
