"""What captures of CUDA graphs need of vLLM, on the CPU."""

from collections.abc import Iterator

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager


@pytest.fixture
def graph_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of a pool of memory, of which the CPU has none."""
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", (0, 1))


@pytest.fixture
def scratch() -> Iterator[None]:
    """vLLM's manager of scratch memory, which is the process's."""
    init_workspace_manager(torch.device("cpu"))
    yield
    reset_workspace_manager()
