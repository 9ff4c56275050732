"""The load of a node, from a controller: every request counts once, and room is what the layout
has.
"""

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.controller import Controller
from flying_serving.controller.node_load import NodeLoad, node_load
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from tests.unit.controller.model_settings import ANSWER, settings

MAX_MODEL_LEN = 1000


def load(controller: Controller, max_model_len: int = MAX_MODEL_LEN) -> NodeLoad:
    return node_load(controller.state, max_model_len)


def test_a_node_without_requests_has_all_its_room() -> None:
    """An engine holds 100 tokens; the widest group of the four 400."""
    found = load(Controller(settings("auto")))
    assert found.requests == 0
    assert found.kv_tokens_used == 0
    assert found.kv_usage == 0.0
    assert found.kv_tokens_free == 400
    assert found.longest_request_tokens == 100
    assert found.longest_request_tokens_any_layout == 400
    assert load(Controller(settings("auto")), 250).longest_request_tokens_any_layout == 250


def test_requests_of_every_engine_and_of_the_pool_count() -> None:
    """Of nine, one waits: of two engines that hold four each."""
    controller = Controller(settings("manual", 2))
    for number in range(9):
        controller.arrived(f"r{number}", RequestSpec(10, 15), 0.0)
    found = load(controller)
    assert found.requests_running == 8
    assert found.requests_waiting == 1
    assert found.to_json()["server_load"] == found.to_json()["load"] == 9


def test_queued_requests_of_groups_count_as_waiting() -> None:
    """Where the policy dispatches at once."""
    controller = Controller(settings("static-tp", 2, capped=False))
    for number in range(6):
        controller.arrived(f"r{number}", RequestSpec(10, 15), 0.0)
    assert len(controller.state.pool) == 0
    found = load(controller)
    assert found.requests_running == 4
    assert found.requests_waiting == 2


def test_tokens_are_used_when_they_are_computed() -> None:
    """A prompt is in the KV cache when its first token has come."""
    controller = Controller(settings("manual", 2))
    controller.arrived("r", RequestSpec(30, 60), 0.0)
    assert load(controller).kv_tokens_used == 0
    controller.got_tokens("r", 2, 1.0)
    found = load(controller)
    assert found.kv_tokens_used == 32
    assert found.kv_tokens_free == 168
    assert found.kv_usage == 0.16


def test_an_older_group_takes_room_from_the_layout() -> None:
    """A group of two has 32 of its 200 tokens, which leaves each of its engines 84 of 100."""
    controller = Controller(settings("manual", 2))
    _, _ = controller.begin_switch(Layout(((0, 1),)), "weave", None, 0.0)
    controller.regrouped(0.0)
    controller.acknowledged([ANSWER], 0.0)
    controller.arrived("r", RequestSpec(30, 150), 0.0)
    controller.got_tokens("r", 2, 1.0)
    assert load(controller).kv_tokens_free == 168
    controller.begin_switch(Layout(((0,), (1,))), "weave", None, 2.0)
    found = load(controller)
    assert found.layout == [[0], [1]]
    assert found.kv_tokens_used == 32
    assert found.kv_tokens_free == 168
    assert found.longest_request_tokens == 100


def test_a_lost_engine_has_no_room_and_the_node_is_degraded() -> None:
    """No group of four is left, and one of two."""
    controller = Controller(settings("auto"))
    controller.engines_lost([3], 1.0)
    found = load(controller)
    assert found.kv_tokens_free == 300
    assert found.longest_request_tokens_any_layout == 200
    assert found.lost_engines == [3]
    assert found.to_json()["degraded"]
    controller.engine_back(3, 2.0)
    assert not load(controller).to_json()["degraded"]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.booleans()), max_size=30))
def test_every_open_request_counts_once(requests: list[tuple[int, int, bool]]) -> None:
    """Whether it waits, runs or has tokens, until it has ended; tokens are never more than there is
    room for.
    """
    controller = Controller(settings("load"))
    for number, (prompt, tokens, ends) in enumerate(requests):
        request_id = f"r{number}"
        controller.arrived(request_id, RequestSpec(prompt, prompt + 30), number / 10)
        for _ in range(tokens if request_id in controller.state.started else 0):
            controller.got_tokens(request_id, 1, number / 10)
        if ends:
            controller.finished([request_id], number / 10)
        found = load(controller)
        assert found.requests == len(controller.state.open_requests)
        assert 0 <= found.kv_usage <= 1
        assert 0 <= found.kv_tokens_free <= 400
