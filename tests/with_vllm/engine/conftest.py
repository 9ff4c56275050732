"""The environment of vLLM's configuration, for all tests of engines."""

import pytest


@pytest.fixture(autouse=True)
def cores_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads a machine's cores when it makes a configuration."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
