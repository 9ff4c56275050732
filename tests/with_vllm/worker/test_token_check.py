"""The check of token parallel steps: it compares each member's rows, and no row of no token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.worker.selfcheck import Difference, LayerOutputs, record, refusal
from flying_serving.worker.token_check import compare_shares, share_of
from tests.with_vllm.worker.small_decoder import LAYERS, STEPS, Model
from tests.with_vllm.worker.token_division import MEMBERS, divided


def differences(rank: int, change: Callable[[Any, Any], None]) -> list[Difference]:
    """Return what a member's check sees of models that were changed."""
    lane1, lane = Model(), Model()
    with torch.no_grad():
        expected = record(lane1, lane1.step, STEPS)
        change(lane1, lane)
        run = divided(lane1, lane, rank)
        return compare_shares(lane1, lane, run, STEPS, expected, (rank, MEMBERS))


@pytest.mark.parametrize("rank", range(MEMBERS))
def test_equal_steps_pass_on_each_member(rank: int) -> None:
    found = differences(rank, lambda lane1, lane: None)
    layers = [name for i in range(LAYERS) for name in (f"layers.{i}.attention", f"layers.{i}")]
    assert [one.stage for one in found] == 2 * ["embed", *layers] + 2 * ["logits"]
    assert refusal(MEMBERS, found, 0.01) is None


def test_a_layer_that_computes_other_numbers_is_found() -> None:
    def wrong(lane1: Any, _lane: Any) -> None:
        lane1.layers[1].down.weight.mul_(1.1)

    found = differences(0, wrong)
    assert {one.stage for one in found if one.share > 0.01} == {"layers.1"}


def test_logits_of_other_numbers_are_found() -> None:
    def wrong(_lane1: Any, lane: Any) -> None:
        lane.embed.weight.mul_(1.1)

    assert {one.stage for one in differences(0, wrong) if one.share > 0.01} == {"logits"}


@given(tokens=st.integers(1, 40), members=st.integers(1, 8))
def test_shares_are_all_rows_and_the_rest_is_not_compared(tokens: int, members: int) -> None:
    rows, norms = torch.randn(tokens, 3), torch.rand(tokens)
    whole = LayerOutputs({"a": [[rows]]}, {"a": [norms]})
    shares = [share_of(whole, rank, members) for rank in range(members)]
    found = torch.cat([share.tensors["a"][0][0] for share in shares])
    base = torch.cat([share.base["a"][0] for share in shares])
    assert torch.equal(found[:tokens], rows)
    assert torch.equal(base[:tokens], norms)
    assert torch.isinf(base[tokens:]).all()
    assert {len(share.base["a"][0]) for share in shares} == {-(-tokens // members)}
