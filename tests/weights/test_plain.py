"""Binding of what no layer class cuts: each tensor of a lane is lane 1's or a view of it, or the lane is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from flying_serving.errors import WeightError
from flying_serving.vllm_hooks.loading import parameters_on_meta
from flying_serving.weights.plain import bind_whole, own_tensors, part_of, refuse_foreign


class Norm(nn.Module):
    """A norm whose weight a backend keeps as well, and a table that the model computes."""

    def __init__(self, size: int, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.impl = SimpleNamespace(sinks=self.weight)
        self.register_buffer("table", table)


def storages(module: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in own_tensors(module).values()}


def lane_norm(size: int, table: torch.Tensor) -> Norm:
    with parameters_on_meta():
        return Norm(size, table)


def test_parameters_are_built_without_data_and_buffers_with_it() -> None:
    lane = lane_norm(8, torch.arange(3.0))
    assert lane.weight.is_meta
    assert torch.equal(lane.table, torch.arange(3.0))
    assert not Norm(8, torch.arange(3.0)).weight.is_meta


def test_a_whole_parameter_is_lane_1s_for_all_who_hold_it() -> None:
    full, lane = Norm(8, torch.arange(3.0)), lane_norm(8, torch.arange(3.0))
    bind_whole("norm", lane, full, 1, 2)
    assert lane.weight.data_ptr() == full.weight.data_ptr() == lane.impl.sinks.data_ptr()
    assert lane.table is not None
    assert lane.table.data_ptr() == full.table.data_ptr()
    refuse_foreign(lane, storages(full))


def test_a_loaded_buffer_replaces_what_the_lane_computed() -> None:
    full, lane = Norm(8, torch.full((3,), 7.0)), lane_norm(8, torch.zeros(3))
    bind_whole("norm", lane, full, 1, 2)
    assert torch.equal(lane.table, full.table)


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
    refuse_foreign(lane, storages(full))


def test_what_is_bound_already_stays() -> None:
    full, lane = Norm(8, torch.full((3,), 7.0)), lane_norm(2, torch.zeros(3))
    bind_whole("embedding", lane, full, 1, 2, but=("weight",))
    assert lane.weight.is_meta
    assert lane.table.data_ptr() == full.table.data_ptr()


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 2), (2, 4), (3, 6)])
def test_a_parameter_cut_by_heads_is_the_view_of_its_rank(rank: int, first: int) -> None:
    full, lane = Norm(8, torch.arange(8.0)), lane_norm(2, torch.arange(8.0)[first : first + 2])
    bind_whole("norm", lane, full, rank, 4)
    assert torch.equal(lane.weight, full.weight[first : first + 2])
    assert lane.weight.untyped_storage().data_ptr() == full.weight.untyped_storage().data_ptr()
    refuse_foreign(lane, storages(full))


def test_ranks_beyond_the_number_of_parts_share_one() -> None:
    full = torch.arange(8.0)
    assert [part_of("k", full, torch.Size([4]), rank, 4)[0].item() for rank in range(4)] == [0, 0, 4, 4]


def test_a_cut_buffer_that_is_no_part_of_lane_1s_is_refused() -> None:
    full, lane = Norm(8, torch.arange(8.0)), lane_norm(8, torch.arange(4.0))  # rank 1 should have 4..7
    with pytest.raises(WeightError, match=r"norm\.table: what a lane computes is no part"):
        bind_whole("norm", lane, full, 1, 2)


@pytest.mark.parametrize("shape", [(3,), (16,), (8, 1), (0,)])
def test_a_shape_that_is_no_part_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightError, match=r"w: shape .* in a lane is no part of \(8,\)"):
        part_of("w", torch.zeros(8), torch.Size(shape), 0, 2)


def test_two_cut_dimensions_are_refused() -> None:
    with pytest.raises(WeightError, match="no part of"):
        part_of("w", torch.zeros(8, 8), torch.Size((4, 4)), 0, 2)


def test_a_tensor_that_lane_1_lacks_is_refused() -> None:
    with pytest.raises(WeightError, match=r"norm\.weight: lane 1 has no tensor of this name"):
        bind_whole("norm", lane_norm(8, torch.zeros(1)), nn.Identity(), 0, 2)


def test_memory_of_its_own_is_refused_whatever_device_it_is_on() -> None:
    """Uninitialised memory on the CPU, as vLLM's Transformers backend leaves it, is no better than the meta device."""
    full, lane = Norm(8, torch.zeros(1)), lane_norm(8, torch.zeros(1))
    with pytest.raises(WeightError, match=r"weight: no shared storage"):
        refuse_foreign(lane, storages(full))
    bind_whole("norm", lane, full, 0, 2)
    lane.weight = nn.Parameter(torch.empty(8))
    with pytest.raises(WeightError, match=r"weight: has memory of its own"):
        refuse_foreign(lane, storages(full))


def test_a_plain_attribute_without_data_is_refused() -> None:
    full, lane = Norm(8, torch.zeros(1)), lane_norm(8, torch.zeros(1))
    bind_whole("norm", lane, full, 0, 2)
    lane.impl.slopes = torch.empty(4, device="meta")
    with pytest.raises(WeightError, match=r"slopes: depends on weights"):
        refuse_foreign(lane, storages(full))
