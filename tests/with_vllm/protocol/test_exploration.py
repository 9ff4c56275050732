"""The protocol, explored: whatever four engines of production classes and a client can do comes to
a good end.

In every state: no collective whose members have come to different steps, no request completed
twice, no block with two owners, no token read that is not there, no exception. From every state an
end can be reached at which each request is completed or aborted, no message and no retained KV is
left, and members have lent what their leaders have borrowed, unless the server has ended; where
work has no end, each lane steps again, and soon once it is due. Where members may sample other
tokens than their leader, none is given out that was computed from them.
"""

import sys

import pytest

from flying_serving.engine import sampled
from tests.explorer import Explored, explore
from tests.with_vllm.protocol.client import Job
from tests.with_vllm.protocol.diverging import DIVERGING, DIVERGING_KV
from tests.with_vllm.protocol.faults import Fault
from tests.with_vllm.protocol.lending import LENDING, LENT_KV
from tests.with_vllm.protocol.migrating import FULL, MIGRATING
from tests.with_vllm.protocol.model import ProtocolModel
from tests.with_vllm.protocol.sampling import STEP_NUMBERS
from tests.with_vllm.protocol.scenario import Scenario, Stage
from tests.with_vllm.protocol.settings import Settings
from tests.with_vllm.protocol.splitting import SPLITTING
from tests.with_vllm.protocol.yielding import YIELDING

APART, PAIRS, ALL = (1, 1, 1, 1), (2, 2, 2, 2), (4, 4, 4, 4)
ROOMY = Settings(blocks=6)
SCARCE = Settings(blocks=2)
"""Each engine has one block to use: whatever runs, nothing else can."""


SCENARIOS = {
    "a pair": Scenario((Stage(jobs=(Job("a", 2, 0),)),)),
    "a pair beside all four": Scenario(
        (Stage(jobs=(Job("a", 2, 2), Job("b", 4, 0))),), settings=ROOMY
    ),
    "there and back, weave": Scenario(
        (
            Stage(PAIRS, jobs=(Job("a", 2, 0),)),
            Stage(ALL, jobs=(Job("b", 4, 0),)),
            Stage(APART, jobs=(Job("c", 1, 1),)),
        ),
        settings=ROOMY,
    ),
    "pairs, then all four, hard": Scenario(
        (Stage(PAIRS, "hard", (Job("a", 2, 0),)), Stage(ALL, "hard", (Job("b", 4, 0),))),
        settings=ROOMY,
    ),
    # a pair that drains while the other half works, through all four, is "both pairs, then all
    # four"
    "a mixed layout, then all four": Scenario(
        (Stage((2, 2, 1, 1), jobs=(Job("a", 2, 0),)), Stage(ALL, jobs=(Job("b", 4, 0),))),
        settings=ROOMY,
    ),
    "all four, then a mixed layout": Scenario(
        (Stage(ALL, jobs=(Job("b", 4, 0),)), Stage((1, 1, 2, 2), jobs=(Job("c", 2, 2),))),
        first=(2, 2, 1, 1),
        settings=ROOMY,
    ),
    "both pairs, then all four": Scenario(
        (Stage(PAIRS, jobs=(Job("a", 2, 0), Job("b", 2, 2))), Stage(ALL, jobs=(Job("c", 4, 0),))),
        settings=ROOMY,
    ),
    "two groups want the blocks that one has": Scenario(
        (Stage(jobs=(Job("a", 2, 0), Job("b", 4, 0))),), settings=SCARCE, lent=((0, 1),)
    ),
    "a group and an engine need more than their blocks": Scenario(
        (Stage(jobs=(Job("a", 1, 1, prompt=4, tokens=2), Job("b", 2, 0, prompt=4, tokens=2))),),
        settings=Settings(blocks=3),
    ),
    "a client leaves while the layout changes": Scenario(
        (Stage(PAIRS, jobs=(Job("a", 2, 0, tokens=2),)), Stage(ALL)), settings=ROOMY, aborts=("a",)
    ),
    "clients leave nested groups": Scenario(
        (Stage(jobs=(Job("a", 2, 0), Job("b", 4, 0))),), settings=ROOMY, aborts=("a", "b")
    ),
    "a leader or a member stops": Scenario(
        (Stage(PAIRS, jobs=(Job("a", 2, 0),)), Stage(ALL, jobs=(Job("b", 4, 0),))),
        settings=ROOMY,
        mortal=(0, 1),
    ),
    **MIGRATING,
    **SPLITTING,
    **YIELDING,
    **LENDING,
    **DIVERGING,
    **{
        f"work without end, {mode} to {max(layout)}": Scenario(
            (Stage(),),
            first=layout,
            mode=mode,
            settings=Settings(endless=((0,), (1,), (0, 1), (0, 1, 2, 3), (2, 3)), exact=True),
        )
        for layout in (APART, PAIRS, ALL)
        for mode in ("weave", "hard")
    },
}

FOUND_IN = {
    Fault.NOT_AT_ONCE: "a pair beside all four",
    Fault.BY_ARRIVAL: "a pair beside all four",
    Fault.RESERVED_DROPPED: "a pair",
    Fault.LEND_DROPPED: "a pair",
    Fault.STEP_TWICE: "a pair",
    Fault.ADDED_TWICE: "a pair",
    Fault.NOT_ADDED: "a pair beside all four",
    Fault.PUBLISHED_EARLY: "a prompt is split between pairs, beside another request",
    Fault.RETAINED_EARLY: "KV goes to a narrower group, or nobody wants it",
    Fault.RELEASED_EARLY: "KV goes to the neighbour while the engine goes on",
    Fault.NOT_REVOKED: "KV goes to the neighbour while the engine goes on",
    Fault.REOPENED: "a prompt is split, and its first part is preempted",
    Fault.ADMITTED_EARLY: "KV goes to a wider group, or nobody wants it",
    Fault.NOT_COMPARED: "KV goes to the neighbour while the engine goes on",
    Fault.NOT_LEFT: "KV goes to the neighbour and back",
    Fault.NOT_YIELDED: "KV that an engine keeps yields to its group",
    Fault.YIELDED_UNREVOKED: "KV goes to the neighbour, and another request needs its blocks",
    Fault.NO_NEXT_BLOCK: "KV of two requests comes to where one has room",
    Fault.SET_ASIDE_EARLY: "prompts are split both ways, with little memory",
    Fault.FREED_EARLY: "KV goes to two engines block by block, and another request needs these",
    Fault.KEEPS_BLOCKS: "answers are split both ways, with little memory",
    Fault.NOT_LOOKED_AGAIN: "KV goes from a group that lends to another engine while weights come "
    "back",
    Fault.TOKENS_NOT_COMPARED: "a member of a pair samples other tokens",
    Fault.GOES_ON_APART: "a member of a pair samples other tokens",
    Fault.ANEW_DROPPED: "a member of a pair samples other tokens",
    Fault.ANEW_NOT_SHOWN: "a member of a pair samples other tokens",
    Fault.NOT_ALL_READY: "weights are lent behind a short request, and come back",
    Fault.NOT_EMPTY: "weights come back while a request has their blocks, and an order follows",
    Fault.NOT_REPLACED: "weights come back while a request has their blocks, and an order follows",
    Fault.TABLES_KEPT: "weights come back while a request has their blocks, and an order follows",
}
"""In which scenario it is found."""
WITH_KV = MIGRATING | SPLITTING | LENT_KV | DIVERGING_KV
WITHOUT_KV = FULL | {"an answer is split, and ends in its first part"}
SMALL = {
    "a pair",
    "a pair beside all four",
    "work without end, weave to 2",
}
"""Scenarios of few states: `make test` explores these, and looks for faults in the first two."""


def marks_of(scenario: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the markers of a test that explores a scenario."""
    return () if scenario in SMALL else (pytest.mark.deep,)


@pytest.fixture(autouse=True)
def few_step_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted round, so that what was done before a step is no other state."""
    monkeypatch.setattr(sampled, "STEPS", STEP_NUMBERS)


def explored(scenario: Scenario, *, fault: Fault | None = None, reduce: bool = True) -> Explored:
    """Visit all states of a scenario."""
    model = ProtocolModel(scenario, fault, reduce=reduce)
    return explore(model, model.first())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks_of(name)) for name in SCENARIOS if name not in LENT_KV],
)
def test_every_scenario_ends_well_in_every_order(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever can happen comes to a good end; how many states that took is printed."""
    model = ProtocolModel(SCENARIOS[name])
    found = explore(model, model.first())
    with capsys.disabled():
        sys.stdout.write(f"\nprotocol, {name}: {found}, with KV {model.engines.pulled} times\n")
    assert found.wrong is None
    assert bool(model.engines.pulled) == (name in WITH_KV and name not in WITHOUT_KV)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=marks_of(FOUND_IN[fault])) for fault in Fault]
)
def test_an_injected_fault_is_found(fault: Fault, capsys: pytest.CaptureFixture[str]) -> None:
    """The exploration of a scenario in which nothing goes wrong finds it, and says how it came to
    that.
    """
    found = explored(SCENARIOS[FOUND_IN[fault]], fault=fault)
    with capsys.disabled():
        sys.stdout.write(
            f"\nprotocol, if {fault.value}: after {found.states} states: {found.wrong}\n"
        )
    assert found.wrong is not None
    assert "TypeError" not in found.wrong
    assert found.trace


@pytest.mark.deep
@pytest.mark.parametrize(
    "scenario",
    [
        *(
            Scenario((Stage(jobs=(Job("a", 1, 0), Job("b", size, 0))),), settings=SCARCE)
            for size in (2, 4)
        ),
        MIGRATING["KV goes to the neighbour and back"],
        MIGRATING["KV goes from all engines to two"],
        SPLITTING["a prompt is split, and its first part is preempted"],
    ],
    ids=["a pair", "all four", "KV is pulled by one", "KV is pulled by two", "a prompt is split"],
)
def test_orders_that_are_left_out_make_no_difference(scenario: Scenario) -> None:
    """With all orders of events there are more states, and as many ends."""
    fewer, all_of_them = explored(scenario), explored(scenario, reduce=False)
    assert fewer.wrong is None
    assert all_of_them.wrong is None
    assert fewer.states < all_of_them.states
    assert fewer.ends == all_of_them.ends
