"""A lane that is bound wrongly ends the start, and the server says which lane, and where it
differs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from flying_deploy.ports import HOST, ReservedPort
from harness import wrong_lanes
from harness.forked import run
from harness.live import FLAGS, tiny
from harness.place import place, server_flags
from harness.preambles import calling
from zoo.architectures import Model
from zoo.checkpoints import write_checkpoint

pytestmark = pytest.mark.server

END_S = 280


def model(shape: str, folder: Path) -> Path:
    """A tiny model; Bloom's, of eight heads with ALiBi, is written into the folder."""
    if shape != "bloom":
        return tiny(shape)
    write_checkpoint(Model("BloomForCausalLM"), folder / "model")
    return folder / "model"


def end_of(path: Path, fault: Callable[[], None], dtype: str, *more: str) -> str:
    """What the server says when it ends. Engines are forked from it, so they have the fault in
    them.
    """
    flags = [flag for flag in FLAGS if not flag.startswith("--dtype")]
    flags += [f"--dtype={dtype}", "--data-parallel-size=2", *more]
    flags = server_flags(flags, 2, place())
    with ReservedPort() as port:
        done = run(
            ["serve", str(path), f"--host={HOST}", f"--port={port.number}", *flags],
            END_S,
            calling(fault),
        )
    assert done.returncode == 2, done.stderr[-3000:]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("flying-serving: ")]
    return said


@pytest.mark.parametrize(
    ("shape", "dtype", "fault", "stage"),
    [
        ("llama", "float32", wrong_lanes.halved_norm, "model.layers.1.self_attn.o_proj"),
        ("llama", "bfloat16", wrong_lanes.halved_norm, "model.layers.1.self_attn.o_proj"),
        ("llama", "bfloat16", wrong_lanes.shifted_columns, "model.layers.0.self_attn.o_proj"),
        ("qwen3", "bfloat16", wrong_lanes.no_query_norm, "model.layers.1.self_attn.o_proj"),
        ("qwen2", "bfloat16", wrong_lanes.no_query_bias, "model.layers.1.self_attn.o_proj"),
        (
            "bloom",
            "bfloat16",
            wrong_lanes.slopes_of_first_rank,
            "transformer.h.1.self_attention.dense",
        ),
    ],
    ids=["norm", "norm-bfloat16", "column", "query-norm", "query-bias", "slopes-of-another-rank"],
)
def test_an_injected_fault_ends_the_start_with_the_lanes_name(
    shape: str, dtype: str, fault: Callable[[], None], stage: str, tmp_path: Path
) -> None:
    said = end_of(model(shape, tmp_path), fault, dtype)
    assert said.startswith(
        "flying-serving: group size 2: this lane does not compute what lane 1 does"
    ), said
    assert f": {stage} is the first layer that differs" in said, said


def test_unbound_tensor_ends_the_start_with_its_name() -> None:
    """Before engines start, as they build what is examined then; a size that nobody asked for is
    not offered.
    """
    said = end_of(tiny("llama"), wrong_lanes.foreign_tensor, "float32", "--group-sizes=1,2")
    assert said == (
        "flying-serving: --group-sizes=2: model.layers.1.input_layernorm.held.0: "
        "has memory of its own, which nothing was loaded into"
    )
