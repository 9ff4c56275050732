"""Tests that would begin too late are not run, and are counted: a plugin of pytest for CI, which is
cut off after some time, whatever the speed of its machine.

`.ci/run` sets both variables. Without them every test runs, in the usual order.
"""

import os
import random
import time
from collections import Counter

import pytest

UNTIL = "FLYING_TESTS_UNTIL_S"
"""A variable: the Unix time in seconds after which no test begins."""
ORDER = "FLYING_TESTS_ORDER"
"""A variable: what the order of the files is drawn from, so that other ones are left out each time.
"""
REASON = "no time was left"


def until_s() -> float:
    """Return the time after which no test begins. Raises pytest.UsageError if it is no number."""
    given = os.environ.get(UNTIL, "")
    try:
        return float(given or "inf")
    except ValueError:
        raise pytest.UsageError(f"{UNTIL}={given}: must be a Unix time in seconds") from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files in the order that is drawn. The tests of a file stay together."""
    if not (drawn_from := os.environ.get(ORDER, "")):
        return
    files = sorted({item.path for item in items})
    random.Random(drawn_from).shuffle(files)
    place = {path: number for number, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leave a test out, with its fixtures, if it would begin too late."""
    if time.time() > until_s():
        pytest.skip(REASON)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files whose tests were left out, each with their number."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if REASON in str(report.longrepr)
    ]
    if not skipped:
        return
    terminalreporter.section(f"not run: {REASON}")
    files = Counter(report.nodeid.partition("::")[0] for report in skipped)
    for path, count in sorted(files.items()):
        terminalreporter.write_line(f"{count} in {path}")
