"""A benchmark that is told to end leaves no server behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.live import ENVIRONMENT, ROOT, wait_until

ENTRY = re.compile(r'^if __name__ == "__main__":\n((?:    .*\n)+)', re.M)
STARTS_SERVERS = re.compile(
    r"^from (?:benchmarks\.(?:systems|emulated|cuda_check\.site)|harness\.(?:live|nodes[\w.]*)"
    r"|flying_lab\.server_process) import",
    re.M,
)
ENTRIES = {
    path.relative_to(ROOT).as_posix(): match[1]
    for folder in ("benchmarks", "zoo")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if STARTS_SERVERS.search(text := path.read_text(encoding="utf-8"))
    and (match := ENTRY.search(text))
}
CHILD = """
import sys, time
from flying_lab.signals import ended_by_signals
try:
    with ended_by_signals():
        open(sys.argv[1], "x").close()
        time.sleep(60)
finally:
    time.sleep(1)
    open(sys.argv[2], "x").close()
"""
PARENT = """
import sys
from benchmarks.__main__ import run_to_its_end
from flying_lab.signals import ended_by_signals
with ended_by_signals():
    run_to_its_end(sys.argv[1:])
"""
WITHIN_S = 30.0


@pytest.mark.parametrize("entry", ENTRIES)
def test_signals_end_a_program_and_its_servers(entry: str) -> None:
    assert ENTRIES[entry].startswith("    with ended_by_signals():\n")


def test_there_are_programs_with_servers() -> None:
    assert len(ENTRIES) > 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_has_time_to_end_its_servers(number: signal.Signals, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    line = [sys.executable, "-c", PARENT, sys.executable, "-c", CHILD, str(begun), str(ended)]
    variables = os.environ | ENVIRONMENT
    with subprocess.Popen(line, env=variables, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(begun.exists, lambda: "the benchmark did not begin")
            process.send_signal(number)
            assert process.wait(WITHIN_S) != 0
        finally:
            process.kill()
    assert ended.exists()
