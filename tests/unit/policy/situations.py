"""Any server, and another layout for it."""

from hypothesis import strategies as st

from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Snapshot
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import Work
from tests.unit.policy.snapshots import SIZES, load, snapshot

LAYOUTS = Layout.all(4, SIZES)
GROUPS = [group for size in SIZES for group in Layout.uniform(4, size).groups]
LOADS = st.builds(
    load,
    requests=st.integers(1, 64),
    left=st.floats(1, 500),
    context=st.floats(1, 2000),
    prefill=st.integers(0, 5000),
)
MIGRATIONS = st.dictionaries(
    st.sampled_from([2, 4]),
    st.builds(MigrationCost, st.floats(0, 0.1), st.floats(0, 1e-4)),
    max_size=2,
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Snapshot, Layout]:
    """Return any server and another layout for it."""
    old, new = draw(st.sampled_from([(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]))
    loads = draw(st.dictionaries(st.sampled_from(GROUPS), LOADS, max_size=4))
    waiting = draw(st.integers(0, 200))
    work = Work(
        draw(st.floats(0.01, 30)), draw(st.floats(1, 2000)), draw(st.floats(1, 500)), waiting
    )
    return snapshot(old, work, loads, migrations=draw(MIGRATIONS)), new
