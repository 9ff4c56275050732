"""A unit test takes at most two seconds: a plugin of pytest that fails one that takes longer.

Processor time of the test and of the processes that it has ended counts, so that a machine that
does other work fails no test. A test with the marker `deep` may take longer: `make test-deep` runs
it.
"""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from harness.examples import ALL_EXAMPLES

MARKER = "deep"
MOST_S = 2.0
ROOT = Path(__file__).parents[1]
SUITES = (ROOT / "tests" / "unit", ROOT / "tests" / "with_vllm")
"""Folders of unit tests."""


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def is_limited(item: pytest.Item) -> bool:
    """Return whether a test is a unit test that `make test` runs. Where property tests try all of
    their examples, none is.
    """
    if ALL_EXAMPLES in os.environ or item.get_closest_marker(MARKER):
        return False
    return any(suite in item.path.parents for suite in SUITES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a unit test that has taken too long."""
    began_s = processor_s()
    yield
    used_s = processor_s() - began_s
    if used_s > MOST_S and is_limited(item):
        pytest.fail(
            f"a unit test takes at most {MOST_S:g} s, this one took {used_s:.1f} s of the "
            f"processor: make it smaller, or mark it `{MARKER}`",
            pytrace=False,
        )
