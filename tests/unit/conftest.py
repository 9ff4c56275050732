"""Tests of code that needs no vLLM: an import of it is an error, since it takes as long as all of a
room's tests.
"""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


class NoVllm(MetaPathFinder):
    """Finds nothing, and refuses vLLM."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises AssertionError for vLLM."""
        assert name != "vllm", "a test that imports vLLM belongs below tests/with_vllm"
        return None


@contextmanager
def refused() -> Iterator[None]:
    """Refuse imports of vLLM as long as the body runs."""
    finder = NoVllm()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse vLLM as long as a module of tests is imported."""
    with refused() if isinstance(collector, pytest.Module) else nullcontext():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def no_vllm() -> Iterator[None]:
    """Refuse vLLM in the tests of a module."""
    with refused():
        yield
