"""The `flying-serving` command, forked from a process that has imported vLLM once: starts without
its imports.

How processes start and end, by signals and with exit codes, is tested on real commands:
tests/deep/server/test_lifecycle.py.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest.mock import patch

from flying_lab.server_process import CPU_ENVIRONMENT, Start, command
from flying_serving.cli.serve import allocator_environment
from flying_serving.worker.parent import end_with_parent
from harness.place import Place, environment, place

ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
"""Where vLLM may lie in a folder, its processes have to find it too."""
ENVIRONMENT = CPU_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(PATHS)}
OWN = dict(os.environ)
"""What this process was started with. vLLM reads some variables when it is imported, which all
commands share, so none that a test sets for its server may be there.
"""
IMPORTS = [
    "transformers",
    "vllm.entrypoints.openai.api_server",
    "flying_serving.cli.serve",
    "flying_serving.engine.core",
    "flying_serving.worker.worker",
    "harness.frozen",
]
_context = multiprocessing.get_context("forkserver")
_started: list["Forked"] = []


class Forked:
    """A command that runs; what `subprocess.Popen` has of a process that leads a group of its own.

    Args:
        arguments: what follows `flying-serving` on the command line.
        environment: all of its variables.
        out: a file for its stdout.
        err: a file for its stderr, which may be the same.
        preamble: Python code that runs before the command.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        out: Path,
        err: Path,
        preamble: str = "",
    ) -> None:
        preloaded = allocator_environment()
        with patch.dict(os.environ, OWN | ENVIRONMENT | preloaded, clear=True):
            forkserver.set_forkserver_preload(IMPORTS)
            forkserver.ensure_running()
        given = {**environment, **preloaded}
        self._process = _context.Process(
            target=_run, args=(list(arguments), given, (out, err), preamble)
        )
        err.touch()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        _started.append(self)

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Tell it to end."""
        self.send_signal(signal.SIGTERM)


def forked(arguments: Sequence[str], preamble: str = "") -> Start:
    """A start of a command, for a ServerProcess; `preamble` is Python code that runs before it.

    On a GPU it has an interpreter of its own: the process that forks has imported models, which may
    have begun to use CUDA, and no engine is to be a child of that.
    """
    if place() is Place.ONE_GPU:
        return command(_line(arguments, preamble), ROOT)
    return lambda environment, log: Forked(arguments, environment, log, log, preamble)


def _line(arguments: Sequence[str], preamble: str) -> list[str]:
    code = (
        f"import sys; sys.argv[0] = 'flying-serving'; exec({preamble!r}, {{}}); "
        "from flying_serving.cli.main import main; main()"
    )
    return [sys.executable, "-c", code, *arguments]


def run(
    arguments: Sequence[str], timeout_s: float, preamble: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises subprocess.TimeoutExpired."""
    if place() is Place.ONE_GPU:
        return _to_its_end(_line(arguments, preamble), timeout_s, environment(Place.ONE_GPU))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        variables = os.environ | ENVIRONMENT | {"COLUMNS": "1000"}  # tables are not wrapped
        process = Forked(arguments, variables, out, err, preamble)
        try:
            status = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
    return subprocess.CompletedProcess(["flying-serving", *arguments], status, *said)


def by_shell(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run the command to its end as a user would, in an interpreter of its own."""
    return _to_its_end([sys.executable, "-m", "flying_serving.cli.main", *arguments], timeout_s)


def _to_its_end(
    line: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def _run(
    arguments: list[str], environment: dict[str, str], files: Sequence[Path], preamble: str
) -> None:
    _be_like_a_command()
    for number, path in enumerate(files, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["flying-serving", *arguments]
    exec(preamble, {})
    from flying_serving.cli.main import main

    try:
        main()
    finally:  # as an interpreter does that ends; a process of multiprocessing does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _be_like_a_command() -> None:
    """Undo what multiprocessing gives a process; end with the one that forks, which ends with
    pytest.
    """
    os.setpgid(0, 0)
    os.chdir(ROOT)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    end_with_parent()
    multiprocessing.set_start_method("fork", force=True)
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]


@atexit.register
def _end_all() -> None:
    """End what nobody has stopped, before multiprocessing waits for it without limit."""
    for process in _started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
