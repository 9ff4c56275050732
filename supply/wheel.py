"""Build the wheel of this checkout.

python -m supply.wheel [FOLDER]

FOLDER is where the wheel is written, by default dist/. The setuptools that requirements/cpu.lock
pins builds it, without a network, from a copy of the sources: no file of an earlier build is in it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from supply.pins import ROOT

SOURCES = (
    *("flying_serving", "flying_deploy", "flying_lab"),
    *("pyproject.toml", "LICENSE", "observability"),
)


def main() -> None:
    """Print the path of the wheel."""
    parser = argparse.ArgumentParser(
        "python -m supply.wheel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=ROOT / "dist")
    print(build(parser.parse_args().folder))


def build(folder: Path) -> Path:
    """Write the wheel into a folder. Returns its path; raises CalledProcessError if the build
    fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy, made = Path(scratch, "sources"), Path(scratch, "made")
        for name in SOURCES:
            _copy(ROOT / name, copy / name)
        line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
        line += ["--no-build-isolation", f"--wheel-dir={made}", str(copy)]
        subprocess.run(line, check=True)
        (wheel,) = made.iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    main()
