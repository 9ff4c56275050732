"""Record what stock vLLM answers for the zoo's models: `python -m tests.deep.zoo.record`."""

import argparse
import subprocess
import sys

from harness.live import ROOT
from tests.deep.zoo.ways import RECORDED, WAYS

if __name__ == "__main__":
    argparse.ArgumentParser("python -m tests.deep.zoo.record", description=__doc__).parse_args()
    sys.exit(
        subprocess.run(
            [sys.executable, "-m", "zoo", f"--record-stock={RECORDED}", *WAYS], cwd=ROOT
        ).returncode
    )
