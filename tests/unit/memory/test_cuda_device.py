"""CUDA's driver: the binding that is missing here, and tensors that torch must not copy."""

import sys

import pytest
import torch

from flying_serving.errors import DeviceMemory
from flying_serving.memory import cuda_device
from flying_serving.memory.cuda_device import DeviceBytes, cuda_driver, cuda_tensor


def test_missing_binding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        DeviceMemory, match=r"^cuda\.bindings\.driver .*; vLLM for CUDA requires it$"
    ):
        cuda_driver()


def test_span_is_described_in_the_array_interface() -> None:
    assert DeviceBytes(4096, 10, None).__cuda_array_interface__ == {
        "data": (4096, False),
        "shape": (10,),
        "typestr": "|i1",
        "version": 3,
    }


def test_copy_by_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = torch.zeros(10, dtype=torch.int8)
    monkeypatch.setattr(cuda_device.torch, "as_tensor", lambda span: elsewhere)
    assert cuda_tensor(DeviceBytes(elsewhere.data_ptr(), 10, None)) is elsewhere
    with pytest.raises(DeviceMemory, match=r"^torch has copied 10 bytes at 0x1000$"):
        cuda_tensor(DeviceBytes(4096, 10, None))
