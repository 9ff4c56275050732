"""Tests of code that imports vLLM: what takes seconds once is done before the first of them, and no
configuration of vLLM asks what cores there are.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def vllm_is_warm() -> Iterator[None]:
    """Import what vLLM imports late, so that no test is charged for it."""
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    yield


@pytest.fixture(autouse=True)
def cores_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads a machine's cores when it makes a configuration."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
