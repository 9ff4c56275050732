"""A unit test takes at most two seconds: a plugin of pytest that names those that take longer.

Processor time of the test and of the processes that it has ended counts. It is told, and fails no
run: the same test takes twice as long on another machine, or beside other work. A test with the
marker `deep` may take longer: `make test-deep` runs it.
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
_SLOW = pytest.StashKey[dict[str, float]]()


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
    """Note a unit test that takes too long."""
    began_s = processor_s()
    yield
    used_s = processor_s() - began_s
    if used_s > MOST_S and is_limited(item):
        item.config.stash.setdefault(_SLOW, {})[item.nodeid] = used_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the unit tests that have taken too long."""
    slow = terminalreporter.config.stash.get(_SLOW, {})
    if not slow:
        return
    terminalreporter.section(f"unit tests over {MOST_S:g} s of the processor")
    terminalreporter.line(f"Make them smaller, or mark them `{MARKER}`:")
    for name, used_s in sorted(slow.items(), key=lambda test: -test[1]):
        terminalreporter.line(f"{used_s:.1f} s {name}")
