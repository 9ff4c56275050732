"""A lane that is bound wrongly ends the start, and the server says which lane, and where it
differs.
"""

from pathlib import Path

import pytest

from flying_deploy.ports import HOST, ReservedPort
from harness.forked import run
from harness.live import FLAGS, tiny
from harness.place import place, server_flags
from zoo.architectures import Model
from zoo.checkpoints import write_checkpoint

pytestmark = pytest.mark.server

END_S = 280
AFTER_BINDING = """
import torch
from torch.nn import Parameter
from flying_serving.weights import share
bind = share.SharedWeights.bind
def wrongly(self, model, rank, degree):
    bind(self, model, rank, degree)
    if degree == 2:
        change(model, self._model, rank)
share.SharedWeights.bind = wrongly
"""
NORM = f"""{AFTER_BINDING}
def change(model, lane1, rank):
    norm = model.model.layers[1].input_layernorm
    norm.weight = Parameter(norm.weight.detach() * 0.5, requires_grad=False)
"""
QUERY_NORM = f"""{AFTER_BINDING}
def change(model, lane1, rank):
    norm = model.model.layers[1].self_attn.q_norm
    norm.weight = Parameter(torch.zeros_like(norm.weight), requires_grad=False)
"""
QUERY_BIAS = f"""{AFTER_BINDING}
def change(model, lane1, rank):
    layer = model.model.layers[1].self_attn.qkv_proj
    width = layer.output_sizes[0] // 2
    bias = lane1.model.layers[1].self_attn.qkv_proj.bias.detach()[rank * width : (rank + 1) * width]
    method, product = layer.quant_method, layer.quant_method._part
    pad = torch.nn.functional.pad
    method._part = lambda x: product(x) - pad(bias, (0, product(x).shape[-1] - width))
"""
SLOPES = f"""{AFTER_BINDING}
def change(model, lane1, rank):
    mine, theirs = (it.transformer.h[1].self_attention.attn.impl for it in (model, lane1))
    # those of the first rank on both
    mine.alibi_slopes = theirs.alibi_slopes[: len(mine.alibi_slopes)]
"""
COLUMN = """
from flying_serving.weights import storage
for columns in (storage.PackedColumns, storage.StridedColumns):
    def shifted(self, rank, degree, part=columns.part):
        product = part(self, rank, degree)
        return product if (rank, degree) != (1, 2) else lambda x: product(x).roll(1, dims=-1)
    columns.part = shifted
"""
FOREIGN = """
import torch
from flying_serving.weights import plain
bind_whole = plain.bind_whole
def with_one_more(name, layer, *others, **options):
    bind_whole(name, layer, *others, **options)
    if name == "model.layers.1.input_layernorm":
        layer.held = [torch.zeros(3)]
plain.bind_whole = with_one_more
"""


def model(shape: str, folder: Path) -> Path:
    """A tiny model; Bloom's, of eight heads with ALiBi, is written into the folder."""
    if shape != "bloom":
        return tiny(shape)
    write_checkpoint(Model("BloomForCausalLM"), folder / "model")
    return folder / "model"


def end_of(path: Path, fault: str, dtype: str, *more: str) -> str:
    """What the server says when it ends. Engines are forked from it, so they have the fault in
    them.
    """
    flags = [flag for flag in FLAGS if not flag.startswith("--dtype")]
    flags += [f"--dtype={dtype}", "--data-parallel-size=2", *more]
    flags = server_flags(flags, 2, place())
    with ReservedPort() as port:
        done = run(
            ["serve", str(path), f"--host={HOST}", f"--port={port.number}", *flags], END_S, fault
        )
    assert done.returncode == 2, done.stderr[-3000:]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("flying-serving: ")]
    return said


@pytest.mark.parametrize(
    ("shape", "dtype", "fault", "stage"),
    [
        ("llama", "float32", NORM, "model.layers.1.self_attn.o_proj"),
        ("llama", "bfloat16", NORM, "model.layers.1.self_attn.o_proj"),
        ("llama", "bfloat16", COLUMN, "model.layers.0.self_attn.o_proj"),
        ("qwen3", "bfloat16", QUERY_NORM, "model.layers.1.self_attn.o_proj"),
        ("qwen2", "bfloat16", QUERY_BIAS, "model.layers.1.self_attn.o_proj"),
        ("bloom", "bfloat16", SLOPES, "transformer.h.1.self_attention.dense"),
    ],
    ids=["norm", "norm-bfloat16", "column", "query-norm", "query-bias", "slopes-of-another-rank"],
)
def test_an_injected_fault_ends_the_start_with_the_lanes_name(
    shape: str, dtype: str, fault: str, stage: str, tmp_path: Path
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
    said = end_of(tiny("llama"), FOREIGN, "float32", "--group-sizes=1,2")
    assert said == (
        "flying-serving: --group-sizes=2: model.layers.1.input_layernorm.held.0: "
        "has memory of its own, which nothing was loaded into"
    )
