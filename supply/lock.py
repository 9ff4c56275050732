"""Write the hashes into requirements/*.lock: of the wheels that pip would install here for each
pin.

python -m supply.lock

Run it after a change of a pin. The hashes are those of pip's configured indexes, for the Pythons of
pyproject.toml on a machine of this kind. PyTorch's CPU build, which has a local version, is looked
up for the running Python alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from supply.pins import ALL_LOCKS, Pin, locked, normalized, parse

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


def main() -> None:
    """Exits with pip's code if a pin cannot be had."""
    argparse.ArgumentParser(
        "python -m supply.lock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    found: defaultdict[str, set[str]] = defaultdict(set)
    for python in PYTHONS:
        pins = [pin for pin in locked() if python == RUNNING or pin.version == pin.public_version]
        for name, digest in hashes(pip_report(pins, python)).items():
            found[name].add(digest)
    for path in ALL_LOCKS:
        pins = sorted(parse(path.read_text(encoding="utf-8")), key=lambda pin: pin.name)
        pins = [replace(pin, hashes=tuple(sorted(found[pin.name]))) for pin in pins]
        path.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        print(f"{path.name}: {len(pins)} pins, {sum(len(pin.hashes) for pin in pins)} hashes")


def pip_report(pins: Sequence[Pin], python: str) -> dict[str, Any]:
    """What pip would install (`pip install --report`). Raises SystemExit if it finds no wheel for a
    pin.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted"), Path(folder, "report")
        wanted.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins), encoding="utf-8")
        line = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
        ]
        line += ["--only-binary=:all:", f"--requirement={wanted}", f"--report={report}"]
        if python != RUNNING:
            line += [f"--python-version={python}", f"--target={folder}"]
        if status := subprocess.run(line, check=False).returncode:
            raise SystemExit(status)
        told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return told


def hashes(report: dict[str, Any]) -> dict[str, str]:
    """The SHA-256 of the file of each distribution in a report of pip."""
    return {
        normalized(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for item in report["install"]
    }


if __name__ == "__main__":
    main()
