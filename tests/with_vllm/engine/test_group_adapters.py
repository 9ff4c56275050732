"""Requests with adapters in engines: a member that lacks an adapter in a step ends its requests,
and no engine.
"""

import pytest
from vllm.config.lora import LoRAConfig

from flying_serving.vllm_adapter.lora.notes import AdapterNotes
from tests.with_vllm.engine.looping_node import LoopingNode, outputs
from tests.with_vllm.vllm_adapter.kv_lanes import make

pytestmark = pytest.mark.usefixtures("classes_imported_here")

LACKED, OTHER = 1, 2
"""Adapters."""
PROMPT, OUTPUTS = 6, 9
WHY = "the files of adapter 'm' have changed since it was loaded"


@pytest.fixture(params=[False, True], ids=["one step", "two steps"])
def node(request: pytest.FixtureRequest) -> LoopingNode:
    return LoopingNode(overlaps=request.param, lora=LoRAConfig(max_loras=2))


def lack(node: LoopingNode, engine: int) -> None:
    """An engine lacks an adapter in the step that it is in."""
    AdapterNotes(node.run_dir).failed(LACKED, engine, WHY, node.clock())


@pytest.mark.parametrize("engine", [0, 1])
def test_requests_end_when_a_member_of_their_group_lacks_it(node: LoopingNode, engine: int) -> None:
    for family, adapter in enumerate((LACKED, OTHER, None), 1):
        node.add(make(str(adapter), family, PROMPT, OUTPUTS, adapter=adapter), 2)
    node.run_until_tokens("1", 2)
    lack(node, engine)
    had = len(node.tokens["1"])
    node.finish()
    assert node.errors == {"1": WHY}
    assert len(node.tokens["1"]) == had
    for family, name in ((2, "2"), (3, "None")):
        assert node.tokens[name] == outputs(family, PROMPT, OUTPUTS)
    node.add(make("later", 4, PROMPT, OUTPUTS, adapter=LACKED), 2)
    node.finish()
    assert node.tokens["later"] == outputs(4, PROMPT, OUTPUTS)


def test_requests_of_lane_1_end_when_their_own_engine_lacks_it(node: LoopingNode) -> None:
    node.add(make("a", 1, PROMPT, OUTPUTS, adapter=LACKED), 1)
    node.run_until_tokens("a", 2)
    lack(node, 1)
    node.run_until_tokens("a", 4)
    assert node.errors == {}
    lack(node, 0)
    node.finish()
    assert node.errors == {"a": WHY}
