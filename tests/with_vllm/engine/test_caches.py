"""A reset of prefix caches waits for members that pull: it reads the messages that there are."""

import pytest

from flying_serving.engine import caches
from flying_serving.engine.caches import RESET_WAIT_S, reset_prefix_caches
from flying_serving.vllm_adapter.keys import MIGRATED_FROM_KEY
from tests.with_vllm.engine.looping_node import LoopingNode, outputs
from tests.with_vllm.vllm_adapter.kv_lanes import make

FORCED = {"reset_running_requests": True, "reset_connector": False}


def pulling() -> tuple[LoopingNode, int]:
    """A request that goes from engine 1 to the group, whose members are about to copy its KV; and
    how many tokens it had.
    """
    node = LoopingNode(overlaps=False)
    node.add(make("a", 3, 9, 12), 1, 1)
    for _ in range(4):
        node.engines[1].run()
    had = len(node.tokens["a"])
    node.engines[1].loop.migrations.retain("a", 5)
    node.add(make("a+1", 3, 9, 12, had=had), 2, **{MIGRATED_FROM_KEY: [1, 1, 5]})
    for _ in range(40):
        node.engines[0].run()
        if node.engines[0].loop.migrations.is_pulling():
            return node, had
        node.engines[1].run()
    raise AssertionError("no member pulls")


def test_a_reset_waits_for_a_member_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    node, had = pulling()
    monkeypatch.setattr(caches.time, "sleep", lambda _: node.engines[1].run())
    assert reset_prefix_caches(node.engines[0].loop, **FORCED)
    assert not node.engines[0].loop.migrations.is_pulling()
    node.finish()
    assert node.tokens["a"][:had] + node.tokens["a+1"] == outputs(3, 9, 12)


def test_a_reset_gives_up_a_member_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be lost: what the API server says of it comes after the reset."""
    node, had = pulling()
    began_s = node.now_s

    def sleep(_: float) -> None:
        node.now_s += 0.5

    monkeypatch.setattr(caches.time, "sleep", sleep)
    assert not reset_prefix_caches(node.engines[0].loop, **FORCED)
    assert RESET_WAIT_S <= node.now_s - began_s < RESET_WAIT_S + 2.0
    node.finish()
    assert node.tokens["a"][:had] + node.tokens["a+1"] == outputs(3, 9, 12)
