"""Tests of code that needs no vLLM: an import of it is an error, since it takes as long as all of a
room's tests.
"""

import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="module", autouse=True)
def no_vllm() -> Iterator[None]:
    """Refuse imports of vLLM."""
    finder = NoVllm()
    sys.meta_path.insert(0, finder)
    yield
    sys.meta_path.remove(finder)
