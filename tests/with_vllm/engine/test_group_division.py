"""What groups divide in each step: the leader chooses by measurements, and all members follow."""

from flying_serving.engine.step_log import divide_steps
from flying_serving.parallelism import Parallelism
from flying_serving.wire import CalibrationRow
from tests.with_vllm.engine.looping_node import LoopingNode, outputs
from tests.with_vllm.vllm_adapter.kv_lanes import make

TENSOR, TOKEN = Parallelism
PROMPT = 20
"""Tokens of a prompt, of which a step takes some."""


def rows(token_s: float, *divisions: Parallelism) -> list[CalibrationRow]:
    """Return measurements in which a token of a prompt takes 1 ms, or `token_s` where tokens are
    divided. Those have 4 tokens or more.
    """
    cost_s = {TENSOR: 0.001, TOKEN: token_s}
    return [
        CalibrationRow(2, 0.001 + tokens * cost_s[division], tokens, True, 0, division)
        for division in divisions
        for tokens in (1, 2, 4, 8, 16, 32)
        if division is TENSOR or tokens >= 4
    ]


def served(measured: list[CalibrationRow]) -> LoopingNode:
    """Return a node whose group has served a request, by these measurements."""
    node = LoopingNode()
    for engine in node.engines:
        divide_steps(engine.loop.lanes, engine.steps, measured)
    node.add(make("a", 1, PROMPT, 6), 2)
    node.finish()
    assert node.tokens == {"a": outputs(1, PROMPT, 6)}
    return node


def test_members_divide_tokens_in_long_steps_alone() -> None:
    node = served(rows(0.0001, TENSOR, TOKEN))
    leader, member = (engine.worker.parallelisms for engine in node.engines)
    assert leader == member
    assert leader[0] is TOKEN
    assert set(leader[-5:]) == {TENSOR}


def test_the_log_knows_what_was_divided() -> None:
    steps = served(rows(0.0001, TENSOR, TOKEN)).engines[0].steps
    divided = [row for row in steps.take_rows() if row.parallelism is TOKEN]
    assert sum(row.prefill_tokens for row in divided) == PROMPT
    assert all(not row.sequences for row in divided)
    assert steps.token_parallel == {2: len(divided)}


def test_members_divide_weights_where_that_is_shorter() -> None:
    node = served(rows(0.01, TENSOR, TOKEN))
    assert {one for engine in node.engines for one in engine.worker.parallelisms} == {TENSOR}
    assert node.engines[0].steps.token_parallel[2] == 0


def test_members_divide_weights_where_nothing_else_was_measured() -> None:
    node = served(rows(0.01, TENSOR))
    assert {one for engine in node.engines for one in engine.worker.parallelisms} == {TENSOR}
