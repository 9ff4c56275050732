"""Entries of functions are noted in open windows: of a process, of its threads and of its forks."""

import subprocess
import sys
from pathlib import Path

from house.source import ROOT
from house.windows import Windows

AT_WORK = """
import os, sys, threading
from flying_serving.layout.groups import Layout

{preamble}

def work():
    Layout.uniform(4, 2).to_lists()

for line in sys.stdin:
    if line == "here\\n":
        work()
    elif line == "thread\\n":
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    elif (pid := os.fork()) == 0:
        work()
        os._exit(0)
    else:
        os.waitpid(pid, 0)
    print("done", flush=True)
"""
UNIFORM = ("layout/groups.py", "Layout.uniform")


def test_entries_of_open_windows_are_noted(tmp_path: Path) -> None:
    windows = Windows(tmp_path)
    code = AT_WORK.format(preamble=windows.preamble)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def do(what: str) -> None:
            print(what, file=process.stdin, flush=True)
            assert process.stdout is not None and process.stdout.readline() == "done\n"

        do("here")
        for what in ("here", "thread", "fork", "fork"):
            with windows.open(what):
                do(what)
            do(what)
        with windows.open("nothing"):
            pass
        process.stdin.close()
    found = windows.entered()
    assert {name: len(rounds) for name, rounds in found.items()} == {
        "here": 1,
        "thread": 1,
        "fork": 2,
        "nothing": 1,
    }
    assert found.pop("nothing") == [{}]
    for rounds in found.values():
        for entered in rounds:
            assert UNIFORM in entered
            assert all(path.endswith(".py") for path, _ in entered)
    here = found["here"][0]
    assert min(here, key=here.__getitem__) == UNIFORM
