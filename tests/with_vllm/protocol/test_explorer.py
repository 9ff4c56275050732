"""The explorer: it visits every state, and finds what is wrong on a shortest way."""

from collections.abc import Hashable, Iterator

import pytest

from tests.explorer import Wrong, explore

State = tuple[int, int]


class Jugs:
    """Two jugs, of 3 and 5 liters, are filled, emptied, and poured into each other, until one holds
    4.
    """

    sizes = (3, 5)
    forbidden: tuple[str, ...] = ()

    def follow(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what can be done with the jugs."""
        for name, after in self._ways(*state):
            if name not in self.forbidden and after != state:
                yield name, after

    def _ways(self, small: int, large: int) -> Iterator[tuple[str, State]]:
        most = (min(small, self.sizes[1] - large), min(large, self.sizes[0] - small))
        yield "fill small", (self.sizes[0], large)
        yield "fill large", (small, self.sizes[1])
        yield "empty small", (0, large)
        yield "empty large", (small, 0)
        yield "small into large", (small - most[0], large + most[0])
        yield "large into small", (small + most[1], large - most[1])

    def over(self, state: State) -> bool:
        """Return whether one holds 4."""
        return 4 in state

    def goal(self, label: str) -> Hashable | None:
        """Return nothing: the jugs have an end."""
        return None

    def describe(self, label: str) -> str:
        """Return a label as it is."""
        return label


def test_all_states_are_visited_once() -> None:
    """As many as there are, counted by hand from what can be reached of 4 x 6 states."""
    explored = explore(Jugs(), (0, 0))
    assert explored.states == 16
    assert explored.ends == 2
    assert explored.wrong is None
    assert str(explored) == f"16 states, {explored.transitions} transitions, 2 ends"


def test_a_rule_that_is_broken_comes_with_a_shortest_way_to_it() -> None:
    """Six steps are the fewest that leave 4 liters."""

    class Refusing(Jugs):
        def over(self, state: State) -> bool:
            if 4 in state:
                raise Wrong("four")
            return False

    explored = explore(Refusing(), (0, 0))
    assert explored.wrong == "four"
    assert len(explored.trace) == 6
    assert str(explored).endswith("   6. large into small")


def test_trace_of_a_failure_ends_with_the_event_that_failed() -> None:
    """The state itself was right; what happened then was not."""

    class Breaking(Jugs):
        def follow(self, state: State) -> Iterator[tuple[str, State]]:
            if state == (3, 0):
                raise Wrong("broken", "drop it")
            yield from super().follow(state)

    assert explore(Breaking(), (0, 0)).trace == ("fill small", "drop it")


def test_state_without_a_successor_is_a_deadlock() -> None:
    """Without emptying and pouring both jugs stay full."""

    class Stuck(Jugs):
        forbidden = ("empty small", "empty large", "small into large", "large into small")

    explored = explore(Stuck(), (0, 0))
    assert explored.wrong == "deadlock: nothing can happen, and not all is done"
    assert len(explored.trace) == 2


def test_going_round_without_a_way_to_an_end_is_found() -> None:
    """Without pouring there is always something to do, and never an end."""

    class Round(Jugs):
        forbidden = ("small into large", "large into small")

    explored = explore(Round(), (0, 0))
    assert explored.states == 4
    assert explored.wrong == "from here on nothing leads to an end"


@pytest.mark.parametrize("reached", ["empty small", "large into small"])
def test_goals_of_what_has_no_end_stay_within_reach(reached: str) -> None:
    """The small jug can be emptied again and again; once nothing can be poured any more, that is
    over.
    """

    class Endless(Jugs):
        forbidden = (
            () if reached == "empty small" else ("empty large", "empty small", "small into large")
        )

        def over(self, state: State) -> bool:
            return False

        def follow(self, state: State) -> Iterator[tuple[str, State]]:
            yield from super().follow(state)
            yield "wait", state

        def goal(self, label: str) -> Hashable | None:
            return label if label == reached else None

    wrong = None if reached == "empty small" else "from here on nothing leads to large into small"
    assert explore(Endless(), (0, 0)).wrong == wrong


def test_more_states_than_there_may_be_are_an_error_of_the_test() -> None:
    """An exploration does not eat the machine's memory."""
    with pytest.raises(AssertionError, match="more than 5 states"):
        explore(Jugs(), (0, 0), most=5)
