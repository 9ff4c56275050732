"""Which engines take part in the migrations of requests."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.commands import Dispatch
from flying_serving.controller.migrations import announcements
from flying_serving.layout.groups import Group, aligned_group, enclosing_group

SIZES = (1, 2, 4)
GROUPS = [aligned_group(engine, size) for size in SIZES for engine in range(0, 4, size)]


@given(pairs=st.lists(st.tuples(st.sampled_from([None, *GROUPS]), st.sampled_from(GROUPS)), max_size=12))
def test_each_engine_is_told_once_of_arrivals_and_messages(pairs: list[tuple[Group | None, Group]]) -> None:
    """One message for all that go from one group to another; requests without KV do not count."""
    commands = [Dispatch(str(n), to, 3, 99, source) for n, (source, to) in enumerate(pairs)]
    told = announcements(commands, SIZES)
    migrations = [(source, to) for source, to in pairs if source is not None]
    members = Counter(engine for source, to in set(migrations) for engine in enclosing_group(source, to, SIZES) or ())
    assert {engine: messages for engine, (_, messages) in told.items()} == dict(members)
    for engine, (arrivals, _) in told.items():
        assert arrivals == sum(to[0] == engine for _, to in migrations)
    assert announcements(commands, SIZES, (0, 2)) == {0: (0, 0), 2: (0, 0)} | told
