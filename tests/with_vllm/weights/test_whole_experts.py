"""Experts of which lanes have slices: one launch at each degree computes what stock vLLM's rank
does.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.experts import triton_moe

from flying_serving.errors import WeightError
from flying_serving.weights.expert_forms import expert_tensors
from flying_serving.weights.formats import FP8_ROUNDING
from flying_serving.weights.kinds import check_cuts
from flying_serving.weights.share import SharedWeights
from harness import triton_cpu
from harness.experts_cpu.kernel import multiply, register
from harness.forked import ENVIRONMENT
from tests.unit.memory.layers import plain_pack
from tests.with_vllm.weights.expert_cases import CASES, WIDE, mixtral, with_kernel
from tests.with_vllm.weights.expert_ranks import (
    WIDEST,
    largest_difference,
    loaded,
    outputs_of,
    routed,
    shared,
)
from tests.with_vllm.worker.loaded import tree, written

pytestmark = pytest.mark.usefixtures("classes_imported_here")

EXACT = 1e-6
"""Beside the mean output. The same numbers are multiplied, in another order of rows."""
TIMEOUT_S = 280


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's Triton experts, with products in plain torch."""
    register(monkeypatch.setattr)


@pytest.mark.parametrize("model", CASES.values(), ids=list(CASES))
def test_each_rank_computes_what_stocks_rank_does(model: dict[str, Any], tmp_path: Path) -> None:
    with with_kernel(tmp_path, model) as config:
        assert largest_difference(config) <= EXACT


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_triton_kernel_reads_slices_as_it_reads_whole_weights(name: str) -> None:
    """vLLM's own kernel, in Triton's interpreter."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.with_vllm.weights.interpreted_experts import main; main({name!r})",
        ],
        env=os.environ | ENVIRONMENT | triton_cpu.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert float(done.stdout.splitlines()[-1]) <= EXACT


def test_a_layer_has_two_launches_at_each_degree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However many units a rank has: those of stock vLLM."""
    launches: list[torch.Size] = []

    def counted(*args: Any, **options: Any) -> None:
        launches.append(args[1].shape)
        multiply(*args, **options)

    monkeypatch.setattr(triton_moe, "invoke_fused_moe_triton_kernel", counted)
    with with_kernel(tmp_path, CASES["floats"]) as config:
        _, models = shared(config, loaded(config))
        for (degree, _), model in models.items():
            launches.clear()
            outputs_of(model, config.model_config.dtype)
            assert launches == [(4, 256 // degree, 64), (4, 64, 128 // degree)]


@pytest.mark.parametrize("model", CASES.values(), ids=list(CASES))
def test_lanes_have_no_copy_of_what_lane_1_loaded(model: dict[str, Any], tmp_path: Path) -> None:
    with with_kernel(tmp_path, model) as config:
        lane1 = loaded(config)
        _, models = shared(config, lane1)
        held = {
            key: tensor.untyped_storage().data_ptr()
            for key, tensor in expert_tensors(routed(lane1)).items()
        }
        for (degree, rank), lane in models.items():
            for key, tensor in expert_tensors(routed(lane)).items():
                if key != "w2_bias" or rank == 0:
                    where = tensor.untyped_storage().data_ptr()
                    assert where == held[key], f"{key} of rank {rank} of {degree}"


def test_rows_of_gate_and_up_are_kept_unit_by_unit(tmp_path: Path) -> None:
    """In the memory that they were loaded into."""
    with with_kernel(tmp_path, CASES["floats"]) as config:
        lane1 = loaded(config)
        weight = routed(lane1).w13_weight
        gate, up = weight.data.clone().unflatten(1, (2, WIDEST, -1)).unbind(1)
        place = weight.data_ptr()
        shared(config, lane1)
        kept = routed(lane1).w13_weight
        assert kept.data_ptr() == place
        assert torch.equal(kept, torch.stack([gate, up], 2).flatten(1, 3))


BLOCKS = mixtral(CASES["fp8-block-of-128"]["quantization_config"], **WIDE)


def test_units_that_part_a_block_with_one_scale_are_refused(tmp_path: Path) -> None:
    with with_kernel(tmp_path, BLOCKS) as config:
        lane1 = tree(config, 1)
        check_cuts(lane1, WIDEST)
        says = r"routed_experts: a unit of 64 columns of an expert is no multiple of 128"
        with pytest.raises(WeightError, match=says):
            check_cuts(lane1, 8)


def test_fp8_experts_of_another_kernel_are_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with with_kernel(tmp_path, BLOCKS) as config:
        lane1 = tree(config, 1)
        method = routed(lane1).quant_method
        monkeypatch.setattr(method, "experts_cls", type("DeepGemmExperts", (), {}))
        says = r"experts in FP8 by vLLM's kernel TRITON alone, .*--moe-backend triton"
        with pytest.raises(WeightError, match=says):
            check_cuts(lane1, 2)


def test_kernel_that_differs_between_degrees_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with with_kernel(tmp_path, CASES["floats"]) as config:
        weights, _ = shared(config, loaded(config))
        lane = tree(config, 2)
        other = type("BatchedTritonExperts", (), {})
        monkeypatch.setattr(routed(lane).quant_method, "experts_cls", other)
        with pytest.raises(WeightError, match="the kernel of groups of 2 is TRITON"):
            weights.bind(lane, 0, 2)


def test_lent_experts_in_fp8_are_refused(tmp_path: Path) -> None:
    with with_kernel(tmp_path, BLOCKS) as config:
        lane1 = loaded(config)
        weights = SharedWeights(lane1, 2, plain_pack, written(tmp_path))
        with pytest.raises(WeightError, match=r"quantized experts cannot be lent"):
            weights.complete(tree(config, 2))


def test_without_groups_experts_in_fp8_stay_as_vllm_made_them(tmp_path: Path) -> None:
    with with_kernel(tmp_path, BLOCKS) as config:
        lane1 = loaded(config)
        layer = routed(lane1)
        before, method = expert_tensors(layer), layer.quant_method
        weights = SharedWeights(lane1, 1, None)
        weights.complete(lane1)
        assert layer.quant_method is method
        assert all(tensor is before[key] for key, tensor in expert_tensors(layer).items())


def test_degrees_may_differ_by_the_rounding_of_inputs_to_fp8(tmp_path: Path) -> None:
    with with_kernel(tmp_path, CASES["fp8-channel"]) as config:
        weights, _ = shared(config, loaded(config))
        assert weights.input_rounding == FP8_ROUNDING
