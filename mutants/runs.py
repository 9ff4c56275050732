"""Runs of the tests of an area with an edit.

Each is in a process forked from one that has imported all that they import, but no module of this
repository.
"""

import importlib
import linecache
import math
import os
import resource
import signal
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

from mutants.edits import Edit

SLOW_S = 0.3
"""A test that takes longer without an edit runs after the others."""
OURS = {
    *("flying_serving", "flying_deploy", "flying_lab", "harness", "tests", "mutants"),
    *("__main__", "__mp_main__"),
}
FACTOR, MORE_S = 2, 10
"""A run may take so many times the processor time of the unedited code, and some seconds."""
DEADLINE_S = 120
"""Seconds that a test may take, also if it only waits."""
FORK = get_context("fork")


class Run(NamedTuple):
    """What the tests of an area said. `verdict`: "killed", "survived" or "timeout" (killed, too).

    `by`: the test that failed. `processor_s`: of the run. `slow`: its slow tests. `imported`:
    modules that are not ours.
    """

    verdict: str
    by: str = ""
    processor_s: float = math.inf
    slow: frozenset[str] = frozenset()
    imported: tuple[str, ...] = ()


UNKNOWN = Run("survived")
"""What is known before the first run of an area."""


class _Edited(MetaPathFinder):
    """Finds the edited module, and no other."""

    def __init__(self, edit: Edit) -> None:
        path = Path(edit.path)
        self._path = path
        self._name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        self._source = edit.applied(path.read_bytes())

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, str(self._path), self._source)
        return spec_from_file_location(fullname, self._path, loader=loader)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> Any:
        lines = self._source.decode().splitlines(keepends=True)
        # for `inspect`, whose text Triton compiles; without a time it is not read from the file
        linecache.cache[self.path] = (len(self._source), None, lines, self.path)
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Plugin:
    """Notes the first failure and the slow tests, which run last.

    Hypothesis draws the same examples each time, and shrinks none.
    """

    def __init__(self, late: frozenset[str]) -> None:
        self.by = ""
        self.slow: set[str] = set()
        self._late = late

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", settings(), derandomize=True, database=None, phases=phases
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid in self._late)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.duration > SLOW_S:
            self.slow.add(report.nodeid)
        if report.failed and not self.by:
            self.by = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid


def run(files: list[str], edit: Edit | None = None, unedited: Run = UNKNOWN) -> Run:
    """Run tests until one fails. `unedited`: of the same tests without an edit."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_child, args=(theirs, files, edit, unedited))
    process.start()
    theirs.close()
    try:
        found: Run = ours.recv()
    except EOFError:
        process.join()
        timed_out = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        found = Run("timeout" if timed_out else "killed", f"exit code {process.exitcode}")
    process.join()
    with suppress(ProcessLookupError):  # of processes that a test has left
        os.killpg(process.pid or 0, signal.SIGKILL)
    return found


def preload(modules: tuple[str, ...]) -> None:
    """Import what the tests of an area import, in the same order."""
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)


def _child(answer: Connection, files: list[str], edit: Edit | None, unedited: Run) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2) if edit else (0,):
        os.dup2(nothing, stream)
    if unedited.processor_s < math.inf:
        limit_s = int(FACTOR * unedited.processor_s + MORE_S)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
    if edit is not None:
        sys.meta_path.insert(0, _Edited(edit))
    plugin = _Plugin(unedited.slow)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:harness.unit_time"]
    options += [f"--timeout={DEADLINE_S}"]
    warnings = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *warnings, *files], plugins=[plugin])
    used = resource.getrusage(resource.RUSAGE_SELF)
    names = tuple(name for name in sys.modules if name.partition(".")[0] not in OURS)
    verdict = "survived" if code == pytest.ExitCode.OK else "killed"
    used_s = used.ru_utime + used.ru_stime
    answer.send(Run(verdict, plugin.by, used_s, frozenset(plugin.slow), names))
