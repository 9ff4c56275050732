"""Write docs/design/licences.md: the licence of each distribution in requirements/, as its
installed metadata says.

python -m supply.licences
"""

import argparse
import os
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from supply.pins import ALL_LOCKS, ROOT, Pin, locked, parse

PAGE = ROOT / "docs" / "design" / "licences.md"
MAX_NAME = 60
"""Characters of a licence's name: some packages give the text of the licence in place of it."""
_CLASSIFIER = "License :: "
_NO_NAMES = ("OSI Approved", "DFSG approved", "UNKNOWN")
READ = {
    "oss-harmony": "Apache-2.0",
    "setuptools": "MIT",
    "tiktoken": "MIT",
}
"""Read in the licence file of packages whose metadata do not name one."""
HEAD = """# Licences

Flying Serving is under the Apache License 2.0 ([LICENSE](../../LICENSE)). The lock files in
`requirements/` install what follows beside it: `cpu.lock` a server, `lab.lock` the libraries of the
laboratory (`flying_lab/`), `dev.lock` tests and checks, `ray.lock` nodes behind Ray Serve,
`docs.lock` the tools of the site. The metadata of each distribution name its licence;
`make licences` writes this page.
"""


def main() -> None:
    """Needs every distribution to be installed."""
    argparse.ArgumentParser(
        "python -m supply.licences",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    PAGE.write_text(page(ALL_LOCKS), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(locked())} distributions")


def installed(name: str) -> Distribution:
    """A distribution of this environment or a directory in PYTHONPATH.

    Not one that another carries along (setuptools may put such on the path).
    """
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    for found in Distribution.discover(name=name, path=[sysconfig.get_path("purelib"), *more]):
        return found
    raise PackageNotFoundError(name)


def page(locks: Iterable[Path]) -> str:
    """The page of some lock files, of which all is installed. Raises PackageNotFoundError if
    something is not.
    """
    tables = [table(path.name, parse(path.read_text(encoding="utf-8"))) for path in locks]
    return "\n".join([HEAD, *tables])


def table(title: str, pins: Sequence[Pin]) -> str:
    """The section of one lock file."""
    rows = [f"| {pin.name} | {pin.version} | {licence(installed(pin.name))} |" for pin in pins]
    return "\n".join(
        [f"## {title}\n", "| distribution | version | licence |", "|---|---|---|", *rows, ""]
    )


def licence(package: Distribution) -> str:
    """What its metadata call it: an SPDX expression, classifiers, or a short text. Raises
    ValueError if they do not.
    """
    told = package.metadata
    for expression in told.get_all("License-Expression") or ():
        return str(expression)
    for text in told.get_all("License") or ():
        if 0 < len(name := text.strip()) <= MAX_NAME and "\n" not in name and name not in _NO_NAMES:
            return str(name)
    classifiers = [
        text for text in told.get_all("Classifier") or () if text.startswith(_CLASSIFIER)
    ]
    names = [name for text in classifiers if (name := text.rpartition(" :: ")[2]) not in _NO_NAMES]
    if names:
        return ", ".join(names)
    try:
        return READ[told["Name"]]
    except KeyError:
        raise ValueError(
            f"{told['Name']}: its metadata name no licence; read its licence file for READ"
        ) from None


if __name__ == "__main__":
    main()
