"""The lock files: a pin is `name==version`, followed by the hashes of the wheels that may be
installed for it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = tuple(ROOT / "requirements" / f"{name}.lock" for name in ("cpu", "lab", "dev"))
"""Of the one environment."""
RAY_LOCK = ROOT / "requirements" / "ray.lock"
"""What Ray Serve needs beside it, in a directory of its own: vLLM imports Ray where it is."""
DOCS_LOCK = ROOT / "requirements" / "docs.lock"
"""What `make docs` needs beside LOCKS, in a directory of its own. Nothing that is served has it."""
ALL_LOCKS = (*LOCKS, RAY_LOCK, DOCS_LOCK)
_HASH = "--hash=sha256:"


@dataclass(frozen=True)
class Pin:
    """One distribution. `name`: normalized. `hashes`: SHA-256 in hexadecimal digits, sorted."""

    name: str
    version: str
    hashes: tuple[str, ...] = ()

    @property
    def public_version(self) -> str:
        """Without the label of a local build, such as torch's `+cpu`."""
        return self.version.partition("+")[0]

    def __str__(self) -> str:
        """As it is written in a lock file."""
        return " \\\n".join(
            [f"{self.name}=={self.version}", *(f"    {_HASH}{digest}" for digest in self.hashes)]
        )


def normalized(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> list[Pin]:
    """The pins of a lock file. Raises ValueError for a line that is none."""
    pins = []
    for line in text.replace("\\\n", " ").splitlines():
        pinned, *options = line.split()
        name, exactly, version = pinned.partition("==")
        if not exactly or not all(option.startswith(_HASH) for option in options):
            raise ValueError(f"{line}: must be name==version and hashes")
        pins.append(
            Pin(
                normalized(name),
                version,
                tuple(sorted(option.removeprefix(_HASH) for option in options)),
            )
        )
    return pins


def locked(paths: Iterable[Path] = ALL_LOCKS) -> list[Pin]:
    """The pins of lock files, by default of all."""
    return [pin for path in paths for pin in parse(path.read_text(encoding="utf-8"))]
