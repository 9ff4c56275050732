"""Processes that tests start find vLLM where it lies in a folder that PYTHONPATH names."""

import os
import subprocess
import sys

from harness.forked import ROOT

CODE = """
from harness.forked import ENVIRONMENT
from harness.triton_cpu import ENVIRONMENT as V2
print(ENVIRONMENT["PYTHONPATH"], V2["PYTHONPATH"], sep="\\n")
"""


def test_paths_that_were_given_come_after_this_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys{CODE}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), "/a/folder"])},
        capture_output=True,
        text=True,
        check=True,
    )
    paths = done.stdout.splitlines()
    assert len(paths) == 2
    for path in paths:
        assert path.startswith(str(ROOT))
        assert path.endswith("/a/folder")


def test_nothing_is_added_where_none_were_given() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys{CODE}"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == str(ROOT)
