"""Nothing hangs: engines that take part in several groups never wait for each other in a cycle.

The argument: numbers of all members are taken at once under a lock, so there is one order of all
messages that each member's numbers agree with. Each engine serves in the order of its numbers. Take
the first message in that order whose step is not done: all that precedes it at any of its members
is done, so no member is inside anything else, and each of them can come to it once its message is
there, which nothing else delays. So that step is done, and then the next.

Here the argument is checked on a model of the protocol: every state that it can reach, and long
walks of a larger one.
"""

import random
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest

from flying_serving.comm.order import SequenceNumbers
from flying_serving.layout.groups import Layout
from tests.explorer import explore
from tests.unit.comm.order_protocol import Protocol

DEADLOCK = "deadlock: nothing can happen, and not all is done"
NESTED = ((0, 1), (2, 3), (0, 1, 2, 3))
EIGHT = tuple(group for size in (2, 4, 8) for group in Layout.uniform(8, size).groups)


@pytest.fixture
def order() -> Iterator[SequenceNumbers]:
    """Yield numbers for eight engines."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        order = SequenceNumbers(f"{directory}/order", 8)
        yield order
        order.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("group_steps", "local_steps", "states"),
    [(1, (0, 0, 0, 0), 3_088), (1, (1, 1, 1, 1), 49_408), (2, (0, 0, 0, 1), 42_494)],
)
def test_no_reachable_state_is_a_deadlock(
    group_steps: int, local_steps: tuple[int, ...], states: int
) -> None:
    """Four engines, all their groups, every order of events: each way ends with everything done."""
    protocol = Protocol(NESTED)
    explored = explore(protocol, protocol.first(group_steps, local_steps))
    assert explored.wrong is None
    assert explored.ends == 1
    assert explored.states == states > 1000


@pytest.mark.deep
@pytest.mark.parametrize("local_steps", [(0, 0, 0, 0), (1, 0, 0, 1)])
def test_numbers_that_are_not_taken_at_once_deadlock(local_steps: tuple[int, ...]) -> None:
    """What the lock is for. Two leaders that append to one member after the other find each other's
    half way.
    """
    protocol = Protocol(NESTED, at_once=False)
    explored = explore(protocol, protocol.first(1, local_steps))
    assert explored.wrong == DEADLOCK
    orders = [event for event in explored.trace if "orders" in event]
    # 2 puts its pair's step first at itself, and last at 3: between the two comes the step of all
    # four
    assert orders.index("2 orders (2, 3) of (2,)") < orders.index("0 orders (0, 1, 2, 3) of (2,)")
    assert orders.index("0 orders (0, 1, 2, 3) of (3,)") < orders.index("2 orders (2, 3) of (3,)")


def test_serving_in_the_order_of_arrival_deadlocks() -> None:
    """What the numbers are for: messages of one leader to one member may overtake another's."""
    protocol = Protocol(NESTED, by_number=False)
    explored = explore(protocol, protocol.first(1, (0, 0, 0, 0)))
    assert explored.wrong == DEADLOCK
    assert any("comes to (0, 1, 2, 3)" in event for event in explored.trace)
    assert not any(event.endswith("step") for event in explored.trace)


def test_groups_that_share_no_more_than_one_engine_need_neither() -> None:
    """The exploration does not find deadlocks where there are none."""
    for pairs in (((0, 1), (2, 3)), ((0, 1),)):
        protocol = Protocol(pairs, at_once=False, by_number=False)
        explored = explore(protocol, protocol.first(2, (1, 1, 1, 1)))
        assert explored.wrong is None
        assert explored.ends == 1


@pytest.mark.parametrize("seed", range(20))
def test_long_walks_of_eight_engines_end_with_all_work_done(
    order: SequenceNumbers, seed: int
) -> None:
    """Seven nested groups. The model's numbers are the ones that the real SequenceNumbers gives
    out.
    """
    chance = random.Random(seed)
    protocol = Protocol(EIGHT)
    state = protocol.first(4, (2,) * 8)
    numbers: list[list[int]] = []
    taken: list[list[int]] = []
    while following := list(protocol.follow(state)):
        # some walks run to the end of what is ordered first, some order all they can, some deliver
        # late
        favoured = ("orders", "hears", "comes", "step", "alone", "")[seed % 6]
        likely = [one for one in following if favoured in one[0]]
        name, after = chance.choice(likely if likely and chance.random() < 0.8 else following)
        if "orders" in name:
            group = next(
                g for g, was in enumerate(state.outstanding) if after.outstanding[g] and not was
            )
            numbers.append([state.next_number[member] for member in EIGHT[group]])
            taken.append(order.take(EIGHT[group][0], EIGHT[group]))
        state = after
    assert protocol.over(state)
    assert numbers == taken
    assert len(taken) == 4 * len(EIGHT)
