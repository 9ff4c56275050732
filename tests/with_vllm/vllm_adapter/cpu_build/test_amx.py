"""A product of int4 weights by the tiles of this CPU, if it has some, is as one by its vectors."""

import signal
import subprocess
import sys

import pytest
import torch

from harness.forked import ROOT

PRODUCT = """
import torch
from vllm import _custom_ops
from flying_serving.vllm_adapter.cpu_build import amx

amx.permit()
weight = torch.randint(-(2**31), 2**31, (4, 128), dtype=torch.int32)
scales = torch.ones(1, 64, dtype=torch.bfloat16)
x = torch.randint(-2, 3, (3, 64)).to(torch.bfloat16)
hints = ["vec", "amx"] if torch.cpu._is_amx_tile_supported() else ["vec", "vec"]
vectors, found = (
    _custom_ops.cpu_gemm_wna16(x, weight, scales, None, None, 8, hint) for hint in hints
)
assert vectors.abs().max() > 1 and torch.equal(vectors, found), (vectors, found)
"""


def status_of(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode


@pytest.mark.deep
def test_first_product_of_a_process_may_use_tiles() -> None:
    assert status_of(PRODUCT) == 0


@pytest.mark.deep
def test_vllm_asks_for_no_tiles() -> None:
    """The reason for the correction, on a CPU that has some."""
    has_tiles = torch.cpu._is_amx_tile_supported()
    expected = -signal.SIGILL if has_tiles else 0
    assert status_of(PRODUCT.replace("amx.permit()", "")) == expected
