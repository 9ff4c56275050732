"""Which engines have to meet for the KV of requests that move."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.commands import Dispatch
from flying_serving.controller.moving import exchanges
from flying_serving.layout.groups import Group, aligned_group, enclosing_group

SIZES = (1, 2, 4)
GROUPS = [aligned_group(engine, size) for size in SIZES for engine in range(0, 4, size)]


@given(pairs=st.lists(st.tuples(st.sampled_from([None, *GROUPS]), st.sampled_from(GROUPS)), max_size=12))
def test_each_engine_is_told_of_what_comes_and_of_each_exchange_once(pairs: list[tuple[Group | None, Group]]) -> None:
    """One exchange for all that go from one group to another; who comes without KV does not count."""
    commands = [Dispatch(str(n), to, 3, 99, came) for n, (came, to) in enumerate(pairs)]
    told = exchanges(commands, SIZES)
    moves = [(came, to) for came, to in pairs if came is not None]
    members = Counter(engine for came, to in set(moves) for engine in enclosing_group(came, to, SIZES) or ())
    assert {engine: tickets for engine, (_, tickets) in told.items()} == dict(members)
    for engine, (arrivals, _) in told.items():
        assert arrivals == sum(to[0] == engine for _, to in moves)
    assert exchanges(commands, SIZES, (0, 2)) == {0: (0, 0), 2: (0, 0)} | told
