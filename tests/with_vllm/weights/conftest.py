"""Tests of shared weights, with the kernels that vLLM has for AVX-512 and AVX2: also on a CPU that
has AMX.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM choose its kernels as on a CPU without AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
