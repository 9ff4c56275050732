"""Binding of what no layer class cuts: each tensor of a lane is lane 1's or a view of it, or the
lane is refused.
"""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.weights.loading import parameters_on_meta
from flying_serving.weights.plain import bind_whole, part_of, reachable, refuse_foreign


class Norm(nn.Module):
    """A norm whose weight a backend keeps as well, and a table that the model computes or loads."""

    def __init__(self, size: int, table: torch.Tensor, loaded: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.impl = SimpleNamespace(sinks=self.weight)
        self.register_buffer("table", table, persistent=loaded)


def check(lane: nn.Module, full: nn.Module, rank: int = 0, degree: int = 2) -> None:
    """That the lane has no tensor but those of `full`, and those that equal its part of them."""
    storages = {tensor.untyped_storage().data_ptr() for _, tensor, _ in reachable(full)}
    refuse_foreign(lane, full, storages, rank, degree)


def lane_norm(size: int, table: torch.Tensor, loaded: bool = False) -> Norm:
    with parameters_on_meta():
        return Norm(size, table, loaded)


def test_parameters_are_built_without_data_and_buffers_with_it() -> None:
    lane = lane_norm(8, torch.arange(3.0))
    assert lane.weight.is_meta
    assert torch.equal(lane.table, torch.arange(3.0))
    assert not Norm(8, torch.arange(3.0)).weight.is_meta


def test_whole_parameter_is_lane_1s_for_all_its_holders() -> None:
    full, lane = Norm(8, torch.arange(3.0)), lane_norm(8, torch.arange(3.0))
    bind_whole("norm", lane, full, 1, 2)
    assert lane.weight.data_ptr() == full.weight.data_ptr() == lane.impl.sinks.data_ptr()
    assert lane.table is not None
    assert lane.table.data_ptr() == full.table.data_ptr()
    check(lane, full)


def test_a_loaded_buffer_replaces_what_the_lane_computed() -> None:
    """Whoever holds it: a router that is no module did so, and chose other experts than lane 1
    did.
    """
    full, lane = Norm(8, torch.full((3,), 7.0), True), lane_norm(8, torch.zeros(3), True)
    for norm in (full, lane):
        norm.router = SimpleNamespace(correction_bias=norm.table)
    bind_whole("norm", lane, full, 1, 2)
    assert torch.equal(lane.table, full.table)
    assert lane.router.correction_bias.data_ptr() == full.router.correction_bias.data_ptr()
    check(lane, full)


@pytest.mark.parametrize(
    ("whole", "computed"),
    [
        (torch.full((3,), 7.0), torch.zeros(3)),
        (torch.arange(8.0), torch.arange(4.0)),
    ],  # rank 1 should have 4..7
    ids=["of-the-same-shape", "of-another-rank"],
)
def test_a_computed_buffer_must_be_lane_1s_or_its_part(
    whole: torch.Tensor, computed: torch.Tensor
) -> None:
    full, lane = Norm(8, whole), lane_norm(8, computed)
    with pytest.raises(WeightError, match=r"norm\.table: what a lane computes is no part"):
        bind_whole("norm", lane, full, 1, 2)


def test_earlier_holder_of_a_parameter_holds_lane_1s() -> None:
    """Laguna makes its router's bias, and hands it to the router, which is no module, and to the
    experts.
    """

    def layer() -> nn.Module:
        experts, bias = nn.Module(), nn.Parameter(torch.zeros(4))
        experts.router = SimpleNamespace(bias=bias)
        experts.bias = bias
        return experts

    full = layer()
    with parameters_on_meta():
        lane = layer()
    nn.init.normal_(full.bias)
    bind_whole("experts", lane, full, 0, 2)
    assert torch.equal(lane.router.bias, full.bias)
    check(lane, full)


class Router(ReplicatedLinear):
    """A router, as vLLM makes them, whose bias the experts that it chooses hold as well."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.correction = nn.Parameter(torch.randn(4))
        self.experts = SimpleNamespace(correction=self.correction)


def test_a_routers_bias_is_lane_1s_for_the_experts_too() -> None:
    full = Router()
    full.cpu_linear = len
    with parameters_on_meta():
        lane = Router()
    bind_whole("gate", lane, full, 1, 2)
    assert lane.experts.correction.data_ptr() == full.correction.data_ptr()
    assert lane.weight.data_ptr() == full.weight.data_ptr()
    assert lane.cpu_linear is full.cpu_linear
    check(lane, full)


def test_bound_parameter_stays() -> None:
    full, lane = Norm(8, torch.full((3,), 7.0), True), lane_norm(2, torch.zeros(3), True)
    bind_whole("embedding", lane, full, 1, 2, but=("weight",))
    assert lane.weight.is_meta
    assert lane.table.data_ptr() == full.table.data_ptr()


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 2), (2, 4), (3, 6)])
def test_a_parameter_cut_by_heads_is_the_view_of_its_rank(rank: int, first: int) -> None:
    full, lane = Norm(8, torch.arange(8.0)), lane_norm(2, torch.arange(8.0)[first : first + 2])
    bind_whole("norm", lane, full, rank, 4)
    assert torch.equal(lane.weight, full.weight[first : first + 2])
    assert lane.weight.untyped_storage().data_ptr() == full.weight.untyped_storage().data_ptr()
    check(lane, full)


def test_ranks_beyond_the_number_of_parts_share_one() -> None:
    full = torch.arange(8.0)
    assert [part_of("k", full, torch.Size([4]), rank, 4)[0].item() for rank in range(4)] == [
        0,
        0,
        4,
        4,
    ]


@pytest.mark.parametrize(
    ("whole", "part"), [((8,), (3,)), ((8,), (16,)), ((8,), (8, 1)), ((8,), (0,)), ((8, 8), (4, 4))]
)
def test_a_shape_that_is_no_part_is_refused(whole: tuple[int, ...], part: tuple[int, ...]) -> None:
    with pytest.raises(
        WeightError, match=re.escape(f"w: shape {part} in a lane is no part of {whole}")
    ):
        part_of("w", torch.zeros(whole), torch.Size(part), 0, 2)


def test_a_tensor_that_lane_1_lacks_is_refused() -> None:
    with pytest.raises(WeightError, match=r"norm\.weight: lane 1 has no tensor of this name"):
        bind_whole("norm", lane_norm(8, torch.zeros(1)), nn.Identity(), 0, 2)


def test_own_memory_of_a_lane_is_refused_on_any_device() -> None:
    """Uninitialised memory on the CPU, as vLLM's Transformers backend leaves it, is no better than
    the meta device.
    """
    full, lane = Norm(8, torch.zeros(1)), lane_norm(8, torch.zeros(1))
    with pytest.raises(WeightError, match=r"weight: no shared storage"):
        check(lane, full)
    bind_whole("norm", lane, full, 0, 2)
    lane.weight = nn.Parameter(torch.empty(8))
    with pytest.raises(WeightError, match=r"weight: has memory of its own"):
        check(lane, full)


def bound(rank: int = 0) -> tuple[Norm, Norm]:
    full, lane = Norm(8, torch.zeros(1)), lane_norm(8, torch.zeros(1))
    bind_whole("norm", lane, full, rank, 2)
    return full, lane


@pytest.mark.parametrize(
    ("hide", "name"),
    [
        (lambda tensor: tensor, "impl.held"),
        (lambda tensor: {"a": [(tensor,)]}, "impl.held.a.0.0"),
        (lambda tensor: lambda: tensor, "impl.held.tensor"),
        (lambda tensor: partial(torch.add, tensor), "impl.held.arguments.0"),
        (lambda tensor: Holder(tensor).get, "impl.held.self.inner"),
    ],
)
def test_own_tensor_of_a_lane_is_found_in_any_attribute(
    hide: Callable[[torch.Tensor], object], name: str
) -> None:
    full, lane = bound()
    full.impl.held, lane.impl.held = hide(torch.zeros(4)), hide(torch.zeros(4))
    with pytest.raises(
        WeightError, match=rf"^{name}: has memory of its own, which nothing was loaded into"
    ):
        check(lane, full)
    lane.impl.held = full.impl.held
    check(lane, full)


class Holder:
    """Has a slot in place of a dictionary."""

    __slots__ = ("inner",)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def get(self) -> torch.Tensor:
        return self.inner


def test_a_plain_attribute_without_data_is_refused() -> None:
    full, lane = bound()
    lane.impl.slopes = torch.empty(4, device="meta")
    with pytest.raises(WeightError, match=r"^impl\.slopes: no shared storage for this tensor"):
        check(lane, full)


def attention(scale: float) -> nn.Module:
    """A layer with the scales that vLLM keeps on the CPU."""
    layer = nn.Module()
    layer._k_scale_cpu, layer._v_scale_cpu = torch.tensor(scale), torch.tensor(scale + 1)
    return layer


def test_scales_that_vllm_keeps_on_the_cpu_are_lane_1s() -> None:
    """vLLM moves them there when it has loaded a model; a lane is only built."""
    full = attention(2.0)
    with torch.device("meta"):
        lane = attention(1.0)
    bind_whole("attn", lane, full, 1, 2)
    assert lane._k_scale_cpu is full._k_scale_cpu
    assert lane._v_scale_cpu is full._v_scale_cpu
    check(lane, full)


def test_tensor_on_another_device_than_lane_1s_is_named() -> None:
    full, lane = bound()
    full.register_buffer("scales", torch.ones(2), persistent=False)
    lane.register_buffer("scales", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(
        WeightError, match=r"^norm\.scales: what a lane computes is no part of what lane 1 has"
    ):
        bind_whole("norm", lane, full, 0, 2)


@pytest.mark.parametrize(("rank", "right"), [(0, [1.0, 2.0]), (1, [3.0, 4.0])])
def test_slopes_that_a_lane_computes_must_be_its_ranks(rank: int, right: list[float]) -> None:
    full, lane = bound(rank)
    full.impl.alibi_slopes = torch.arange(1.0, 5.0)
    lane.impl.alibi_slopes = torch.tensor(right)
    check(lane, full, rank)
    with pytest.raises(
        WeightError,
        match=r"^impl\.alibi_slopes: what a lane computes is no part of what lane 1 has",
    ):
        check(lane, full, 1 - rank)
    del full.impl.alibi_slopes
    with pytest.raises(WeightError, match=r"^impl\.alibi_slopes: has memory of its own"):
        check(lane, full, rank)


def test_only_a_weight_that_is_no_parameter_may_be_a_lanes_own() -> None:
    full, lane = bound()
    full.scale, lane.scale = (
        SimpleNamespace(weight=torch.ones(8)),
        SimpleNamespace(weight=torch.ones(8)),
    )
    check(lane, full)
    lane.weight = nn.Parameter(full.weight.detach().clone(), requires_grad=False)
    with pytest.raises(WeightError, match=r"^weight: has memory of its own"):
        check(lane, full)
