"""Record what stock vLLM answers for the models of test_ways.py: `python -m tests.zoo.record`."""

import argparse
import subprocess
import sys

from tests.live import ROOT
from tests.zoo.test_ways import RECORDED, WAYS

if __name__ == "__main__":
    argparse.ArgumentParser("python -m tests.zoo.record", description=__doc__).parse_args()
    sys.exit(subprocess.run([sys.executable, "-m", "zoo", f"--record-stock={RECORDED}", *WAYS], cwd=ROOT).returncode)
