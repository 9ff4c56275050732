"""Generators of the CPU that can take back a draw."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flying_serving.vllm_adapter.cpu_build.sampling import sample_and_rewind


def draw(generator: torch.Generator) -> list[float]:
    return torch.rand(3, generator=generator).tolist()


def discarding(original: Any, discards: bool) -> tuple[list[float], torch.Generator]:
    """Return the draw of a step whose sample is discarded or not, and the generator after it."""
    generator = torch.Generator().manual_seed(7)
    mask = SimpleNamespace(np=np.array([discards]))
    batch = SimpleNamespace(generators={0: generator}, num_reqs=1, req_ids=["a"])
    runner: Any = SimpleNamespace(
        input_batch=batch, discard_request_mask=mask, requests={"a": SimpleNamespace()}
    )
    drawn = sample_and_rewind(original, runner, None)
    return drawn, batch.generators[0]


@pytest.mark.parametrize("discards", [True, False])
def test_discarded_draw_is_drawn_again(discards: bool) -> None:
    def original(runner: Any, _: Any) -> list[float]:
        generator = runner.input_batch.generators[0]
        drawn = draw(generator)
        if discards:
            generator.set_offset(generator.get_offset() - 4)
        return drawn

    drawn, after = discarding(original, discards)
    assert (draw(after) == drawn) is discards


def test_generators_of_a_cpu_have_no_offset() -> None:
    """The reason for the patch: vLLM takes a draw back by its offset."""
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator().get_offset()
