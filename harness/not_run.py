"""The tests that are not run on one GPU: a plugin of pytest that takes them out and lists them.

A test that makes no sense there has the marker `cpu_only`, with the reason.
"""

from collections import Counter

import pytest

from harness.place import SETTING, Place, place

MARKER = "cpu_only"
_NOT_RUN = pytest.StashKey[Counter[tuple[str, str]]]()


def reason_of(marker: pytest.Mark) -> str:
    """Return the reason of a marker.

    Raises:
        UsageError: if it has none.
    """
    (reason,) = marker.args or ("",)
    if not reason:
        raise pytest.UsageError(f"@pytest.mark.{MARKER}: needs a reason")
    return str(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the marked tests if the servers run on one GPU."""
    marked = {item: marker for item in items if (marker := item.get_closest_marker(MARKER))}
    reasons = {item: reason_of(marker) for item, marker in marked.items()}
    if place() is not Place.ONE_GPU:
        return
    config.stash[_NOT_RUN] = Counter(
        (item.nodeid.partition("[")[0], reason) for item, reason in reasons.items()
    )
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]


def pytest_runtestloop(session: pytest.Session) -> None:
    """Refuse to run tests of a GPU where there is none; collecting needs none.

    Raises:
        UsageError: if there is none.
    """
    if place() is not Place.ONE_GPU or session.config.option.collectonly:
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(f"{SETTING}={Place.ONE_GPU}: there is no GPU")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that were taken out, and why."""
    not_run = terminalreporter.config.stash.get(_NOT_RUN, None)
    if not_run is None:
        return
    terminalreporter.section("not run on one GPU")
    for (test, reason), count in sorted(not_run.items()):
        times = f" ({count} cases)" if count > 1 else ""
        terminalreporter.write_line(f"not run: {test}{times}: {reason}")
