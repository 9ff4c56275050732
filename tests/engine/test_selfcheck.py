"""The self-check of lanes: it passes lanes that equal lane 1 and names the first layer of those that do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flying_serving.engine.selfcheck import Difference, compare, record, refusal, require_alike, tolerance
from flying_serving.errors import LaneError
from flying_serving.vllm_hooks.stages import stages

WIDTH, VOCABULARY, LAYERS, TOKENS = 16, 32, 3, 12


class Embedding(VocabParallelEmbedding):
    """vLLM's class, so that it is found, with a plain look-up."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


class Logits(LogitsProcessor):
    """vLLM's class, with the product alone. Without `gathers` it is that of a rank that gets no logits."""

    def __init__(self, gathers: bool) -> None:
        nn.Module.__init__(self)
        self.gathers = gathers

    def forward(self, head: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        return x @ head.t() if self.gathers else None


class Layer(nn.Module):
    """Returns its own part and the residual apart, as vLLM's decoder layers do, and adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x.clone() if residual is None else residual.add_(x)
        return torch.tanh(self.down(residual)), residual


class Model(nn.Module):
    """A decoder in small; the same seed makes the same weights."""

    def __init__(self, gathers: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = Embedding()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.logits = Logits(gathers)

    def step(self, tokens: torch.Tensor) -> None:
        x, residual = self.embed(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        self.logits(self.embed.weight, x + residual)


STEPS = [torch.arange(TOKENS), torch.arange(TOKENS) + TOKENS]


def differences(change: Callable[[Any], None], gathers: bool = True) -> list[Difference]:
    """What the check sees of a lane whose model was changed."""
    lane1, lane = Model(), Model(gathers)
    with torch.no_grad():
        change(lane)
        return compare(lane, lane.step, STEPS, record(lane1, lane1.step, STEPS))


def test_stages_are_the_embedding_each_layer_and_the_logits() -> None:
    assert {name: stage.kind for name, stage in stages(Model()).items()} == {
        "embed": "embedding",
        "layers.0": "layer",
        "layers.1": "layer",
        "layers.2": "layer",
        "logits": "logits",
    }


def test_an_equal_lane_passes() -> None:
    found = differences(lambda lane: None)
    assert [difference.stage for difference in found] == 2 * ["embed", "layers.0", "layers.1", "layers.2", "logits"]
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
    assert reason.startswith(f"group size 4: this lane does not compute what lane 1 does: layers.{layer} is the first")


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


def test_a_rank_that_gathers_no_logits_compares_the_rest() -> None:
    assert refusal(2, differences(lambda lane: None, gathers=False), tolerance(torch.float32)) is None


def test_a_lane_of_which_nothing_was_seen_is_refused() -> None:
    assert refusal(2, [], 0.01) == "group size 2: nothing of this lane could be compared with lane 1"


def test_all_members_refuse_together() -> None:
    """The one that saw no difference too: else it would wait for those that have ended."""
    fine, wrong = [Difference("layers.0", 0.0)], [Difference("layers.0", 0.5)]
    assert require_alike(2, fine, 0.01, lambda mine: mine) == 0.0
    with pytest.raises(LaneError, match=r"layers\.0 is the first layer that differs, the largest difference is 0\.5"):
        require_alike(2, wrong, 0.01, lambda mine: mine)
    with pytest.raises(LaneError, match="another member of the group refuses this lane"):
        require_alike(2, fine, 0.01, lambda mine: True)


def test_hooks_are_gone_afterwards() -> None:
    model = Model()
    record(model, model.step, STEPS)
    assert not any(module._forward_hooks for module in model.modules())
