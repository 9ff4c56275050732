"""Experts of gpt-oss in MXFP4 that a group drops and fetches back, with a kernel in plain torch."""

from pathlib import Path

import pytest

from flying_serving.errors import WeightError
from harness.mxfp4_cpu.kernel import register
from tests.with_vllm.weights.lending.droppable_lanes import WAYS, WIDEST, DroppableLanes, same
from tests.with_vllm.worker.configurations import GPT_OSS_MXFP4, configuration
from tests.with_vllm.worker.loaded import alone, written

pytestmark = pytest.mark.usefixtures("classes_imported_here", "kernel")

MODEL = GPT_OSS_MXFP4 | {"num_local_experts": 4}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch.setattr)


@pytest.mark.parametrize("way", ["packed", "unpacked"])
def test_lanes_have_the_same_bits_when_experts_are_back(way: str, tmp_path: Path) -> None:
    with alone(configuration(tmp_path, MODEL)) as config:
        worker = DroppableLanes(config, 1, WAYS[way], written(tmp_path))
        before = {size: worker.results(size) for size in worker.lanes}
        experts = {name for name in before[1] if name.endswith("experts.routed_experts")}
        for degree in (WIDEST, 2):
            assert experts <= {change.layer for change in worker.drop_all(degree)}
            assert same(worker.results(degree), before[degree])
            refused = {name for name, found in worker.results(1).items() if found is None}
            assert experts <= refused
            worker.fetch_all()
            assert all(same(worker.results(size), before[size]) for size in worker.lanes)
    worker.file.close()


def test_an_arena_takes_no_experts_in_mxfp4(tmp_path: Path) -> None:
    """Kernels of CUDA keep them in objects of their own."""
    file = written(tmp_path)
    with (
        alone(configuration(tmp_path, MODEL)) as config,
        pytest.raises(WeightError, match="quantized experts cannot be lent on this device"),
    ):
        DroppableLanes(config, 1, WAYS["placed"], file)
    file.close()
