"""The self-check of lanes: it passes lanes that equal lane 1 and names the first layer of those
that do not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.stages import stages
from flying_serving.worker.selfcheck import (
    Difference,
    compare,
    record,
    refusal,
    require_alike,
    tolerance,
)
from tests.with_vllm.worker.small_decoder import (
    LAYERS,
    STEPS,
    TOKENS,
    WIDTH,
    Layer,
    Model,
)


def differences(
    change: Callable[[Any], None], gathers: bool = True, scale: float = 1.0
) -> list[Difference]:
    """What the check sees of a lane whose model was changed."""
    lane1, lane = Model(scale=scale), Model(gathers, scale)
    with torch.no_grad():
        change(lane)
        return compare(lane, lane.step, STEPS, record(lane1, lane1.step, STEPS))


def test_stages_are_the_embedding_each_layer_and_the_logits() -> None:
    assert {name: stage.kind for name, stage in stages(Model()).items()} == {
        "embed": "embedding",
        **{f"layers.{i}": "layer" for i in range(LAYERS)},
        **{f"layers.{i}.attention": "product" for i in range(LAYERS)},
        "logits": "logits",
    }


def test_an_equal_lane_passes() -> None:
    found = differences(lambda lane: None)
    layers = [name for i in range(LAYERS) for name in (f"layers.{i}.attention", f"layers.{i}")]
    assert [difference.stage for difference in found] == 2 * ["embed", *layers, "logits"]
    assert {difference.share for difference in found} == {0.0}
    assert refusal(2, found, tolerance(torch.float32)) is None


def test_rounding_passes() -> None:
    def round_off(lane: Model) -> None:
        for parameter in lane.layers.parameters():
            parameter.mul_(1 + 1e-5)

    assert refusal(2, differences(round_off), tolerance(torch.float32)) is None


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_uninitialised_norm_or_bias_is_found_in_its_layer(layer: int) -> None:
    """And in no layer after it: each is given lane 1's input."""

    def forget(lane: Model) -> None:
        lane.layers[layer].down.bias.fill_(3.0)

    found = differences(forget)
    assert [d.stage for d in found if d.share > tolerance(torch.float32)] == 2 * [f"layers.{layer}"]
    reason = refusal(4, found, tolerance(torch.float32))
    assert reason is not None
    assert reason.startswith(
        f"group size 4: this lane does not compute what lane 1 does: layers.{layer} is the first"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_off_by_one_are_found_at_every_tolerance(dtype: torch.dtype) -> None:
    def shift(lane: Model) -> None:
        lane.layers[1].down.weight.copy_(lane.layers[1].down.weight.roll(1, dims=0))

    assert "layers.1 is the first" in str(refusal(2, differences(shift), tolerance(dtype)))


def test_one_wrong_row_of_the_embedding_is_found() -> None:
    def forget(lane: Model) -> None:
        lane.embed.weight[5].zero_()

    assert "embed is the first" in str(refusal(2, differences(forget), tolerance(torch.float32)))


def test_a_wrong_head_is_found_in_the_logits() -> None:
    lane1, lane = Model(), Model()
    lane.logits.forward = lambda head, x: x @ head.roll(1, dims=0).t()  # type: ignore[method-assign, assignment]
    with torch.no_grad():
        found = compare(lane, lane.step, STEPS, record(lane1, lane1.step, STEPS))
    assert "logits is the first" in str(refusal(2, found, tolerance(torch.bfloat16)))


def test_nan_where_lane_1_has_numbers_is_infinitely_far() -> None:
    def forget(lane: Model) -> None:
        lane.layers[2].down.weight.fill_(torch.nan)

    assert max(difference.share for difference in differences(forget)) == float("inf")


def test_output_where_lane_1_adds_zero_is_infinitely_far() -> None:
    lane1, lane = Model(), Model()
    with torch.no_grad():
        lane1.layers[1].attention.weight.zero_()
        found = compare(lane, lane.step, STEPS, record(lane1, lane1.step, STEPS))
    assert {d.stage for d in found if d.share == float("inf")} == {"layers.1.attention"}


def test_a_rank_that_gathers_no_logits_compares_the_rest() -> None:
    assert (
        refusal(2, differences(lambda lane: None, gathers=False), tolerance(torch.float32)) is None
    )


def test_an_error_before_a_product_counts_in_full() -> None:
    """It is some percent of what the layer adds, and of nothing after it."""

    def forget(lane: Model) -> None:
        lane.layers[1].norm.mul_(0.5)

    found = differences(forget)
    assert {d.stage for d in found if d.share > tolerance(torch.bfloat16)} == {"layers.1.attention"}
    assert max(d.share for d in found) == pytest.approx(0.5, rel=1e-4)


def test_a_products_bias_is_neither_compared_nor_written() -> None:
    lane1, lane = Model(), Model()
    with torch.no_grad():
        lane.layers[1].attention.bias.fill_(7.0)
        found = compare(lane, lane.step, STEPS, record(lane1, lane1.step, STEPS))
    assert {d.share for d in found} == {0.0}
    assert lane.layers[1].attention.bias[0] == 7.0


@pytest.mark.parametrize("scale", [1.0, 12.0, 48.0])
@pytest.mark.parametrize("layer", range(2))
def test_a_layer_is_compared_by_what_it_adds_to_its_input(scale: float, layer: int) -> None:
    """Which is not the embedding: models multiply it, by 12 or the root of their width, before the
    first layer.
    """

    def skip(lane: Model) -> None:
        lane.layers[layer].down.weight.zero_()
        lane.layers[layer].down.bias.zero_()

    found = differences(skip, scale=scale)
    assert {d.stage for d in found if d.share > tolerance(torch.bfloat16)} == {f"layers.{layer}"}
    assert max(d.share for d in found) > 0.9


def test_a_few_wrong_tokens_of_a_layer_without_a_router_are_found() -> None:
    """As those of one request would be, of which there are eight."""

    def forget(lane: Model) -> None:
        down = lane.layers[1].down

        def wrong(x: torch.Tensor) -> torch.Tensor:
            out = nn.functional.linear(x, down.weight, down.bias)
            out[:2] = 0.0
            return out

        down.forward = wrong

    assert "layers.1 is the first" in str(
        refusal(2, differences(forget), tolerance(torch.bfloat16))
    )


def test_rounding_of_a_large_input_passes() -> None:
    """In 16 bits the sum of a large input and a little that a layer adds is off by a share of the
    input.
    """
    generator = torch.Generator().manual_seed(0)
    added, large = torch.randn(2, TOKENS, WIDTH, generator=generator).mul(
        torch.tensor([[[1.0]], [[100.0]]])
    )

    def model(change: float) -> Any:
        built = nn.Module()
        built.layers = nn.ModuleList([nn.Identity()])
        built.layers[0].forward = lambda x: (x.float() + added * change).bfloat16()
        return built

    lane1, lane, wrong = model(1.0), model(1.02), model(0.0)
    kept = record(lane1, lane1.layers[0], [large.bfloat16()])
    assert (
        refusal(
            2, compare(lane, lane.layers[0], [large.bfloat16()], kept), tolerance(torch.bfloat16)
        )
        is None
    )
    assert refusal(
        2, compare(wrong, wrong.layers[0], [large.bfloat16()], kept), tolerance(torch.bfloat16)
    )


def test_a_lane_must_run_what_lane_1_runs_as_often() -> None:
    def skip(lane: Model) -> None:
        lane.layers[2].forward = lambda x, residual: (x, residual)  # seen, and does nothing
        lane.layers[1] = nn.Identity()
        lane.step = lambda tokens: lane.layers[2](*lane.layers[0](lane.embed(tokens), None))

    missing = {d.stage for d in differences(skip) if d.share == float("inf")}
    assert missing == {"layers.1.attention", "layers.1", "layers.2.attention", "logits"}


def test_layer_that_lane_1_does_not_run_is_refused() -> None:
    lane1, lane = Model(), Model()
    with torch.no_grad():
        found = compare(lane, lane.step, STEPS, record(lane1, lane1.step, STEPS[:1]))
    half = len(found) // 2
    assert [d.share for d in found] == [0.0] * half + [float("inf")] * half


def test_layers_whose_outputs_are_no_tensors_are_refused() -> None:
    def name_outputs(model: Model) -> None:
        model.layers[0].forward = lambda *inputs: dict(
            enumerate(Layer.forward(model.layers[0], *inputs))
        )
        model.step = lambda tokens: model.layers[0](model.embed(tokens), None)  # type: ignore[method-assign]

    lane1, lane = Model(), Model()
    with torch.no_grad():
        name_outputs(lane1)
        name_outputs(lane)
        found = compare(lane, lane.step, STEPS, record(lane1, lane1.step, STEPS))
    assert "layers.0 is the first layer that differs" in str(
        refusal(2, found, tolerance(torch.bfloat16))
    )


def test_a_lane_of_which_no_layer_was_seen_is_refused() -> None:
    lane = Model()
    lane.step = lambda tokens: lane.embed(tokens)  # type: ignore[method-assign]
    with torch.no_grad():
        found = compare(lane, lane.step, STEPS, record(lane, lane.step, STEPS))
    assert (
        refusal(2, found, 0.01)
        == "group size 2: no layer of this lane could be compared with lane 1"
    )


def test_all_members_refuse_together() -> None:
    """The one that saw no difference too: else it would wait for those that have ended."""
    fine, wrong = [Difference("layers.0", 0.0)], [Difference("layers.0", 0.5)]
    assert require_alike(2, fine, 0.01, lambda mine: mine) == 0.0
    with pytest.raises(
        LaneError,
        match=r"layers\.0 is the first layer that differs, the largest difference is 0\.5",
    ):
        require_alike(2, wrong, 0.01, lambda mine: mine)
    with pytest.raises(LaneError, match="another member of the group refuses this lane"):
        require_alike(2, fine, 0.01, lambda mine: True)


def test_hooks_are_gone_afterwards() -> None:
    model = Model()
    record(model, model.step, STEPS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
