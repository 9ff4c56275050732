"""Two engines and their group, between which requests of tests migrate."""

from vllm.v1.request import Request

from flying_serving.layout.groups import Group
from flying_serving.migration.offers import Offer
from flying_serving.wire import MigrationCounts
from tests.with_vllm.migration.migrating_node import GROUPS, MigratingNode
from tests.with_vllm.vllm_adapter.kv_lanes import make

NOTHING = MigrationCounts(0, 0, 0)
CLOSED = Offer(0, is_final=True, blocks=[])
A, B, BOTH = GROUPS
PAIRS = [(old, new) for old in GROUPS for new in GROUPS if old != new]


def node(blocks: dict[Group, int] | None = None) -> MigratingNode:
    """Two engines, with room."""
    return MigratingNode(dict.fromkeys(GROUPS, 20) | (blocks or {}), overlaps=False)


def begin(
    at: MigratingNode,
    group: Group,
    name: str = "a",
    prompt: int = 10,
    steps: int = 4,
    family: int = 3,
) -> Request:
    """A request that has made some steps: two of them for its prompt."""
    made = make(name, family, prompt, 20)
    at.lanes[group].scheduler.add_request(made)
    for _ in range(steps):
        at.step(group)
    return made


def again(before: Request, name: str, outputs: int = 6) -> Request:
    """The same request as it goes on elsewhere."""
    family = before.prompt_token_ids[0] // 100
    return make(name, family, before.num_prompt_tokens, outputs, had=before.num_output_tokens)


def settle(at: MigratingNode, *, limit_s: float | None = None) -> None:
    """Let engines pull, and handle messages until there are none."""
    for engine in range(2):
        at.migrations[engine].advance(at.now_s, limit_s)
    while any(at.inboxes):
        for engine in range(2):
            at.serve(engine)


def all_free(at: MigratingNode) -> bool:
    """Whether nothing holds a block any more."""
    return all(lane.free() == lane.pool.total for lane in at.lanes.values())


def run_out(at: MigratingNode) -> None:
    """All requests end; their KV is checked then."""
    for _ in range(40):
        for group in GROUPS:
            at.step(group)
    assert all(lane.scheduler.requests == {} for lane in at.lanes.values())
