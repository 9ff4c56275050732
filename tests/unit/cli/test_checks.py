"""`doctor`: what each check says of machines that are not at hand."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flying_serving.cli import checks
from flying_serving.cli.checks import GIB

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "gpus", "state"),
    [
        ("fpu avx avx2 avx512f", [], "ok"),
        ("fpu avx avx2", [], "warn"),
        ("fpu avx", [], "bad"),
        ("fpu", ["one"], "ok"),
    ],
)
def test_vectors(monkeypatch: pytest.MonkeyPatch, flags: str, gpus: list[Any], state: str) -> None:
    """Without AVX2 only a machine with GPUs is of use."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert checks.vectors(gpus, lambda: f"processor: 0\nflags : {flags}\n").state == state


@pytest.mark.parametrize(("free", "state"), [(1, "bad"), (4 * GIB, "warn"), (64 * GIB, "ok")])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int, state: str) -> None:
    """Little memory is a warning, next to none is bad."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert checks.memory().state == state


@pytest.mark.parametrize(("free", "state"), [(2**20, "bad"), (2**25, "warn"), (2**30, "ok")])
def test_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, state: str
) -> None:
    """Containers often have 64 MiB."""
    monkeypatch.setattr(checks, "SHM", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    assert checks.shared_memory().state == state


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another directory does."""
    monkeypatch.setattr(checks, "SHM", tmp_path / "none")
    assert checks.shared_memory().state == "warn"


@pytest.mark.parametrize(("found", "state"), [("0.32.0", "ok"), ("0.31.1", "bad"), (None, "bad")])
def test_vllm_has_one_version_exactly(
    monkeypatch: pytest.MonkeyPatch, found: str | None, state: str
) -> None:
    monkeypatch.setattr(checks, "installed_vllm", lambda: found)
    assert checks.vllm_version().state == state


def test_a_probe_that_fails_or_dies_is_a_reason() -> None:
    """The last line of stderr, or the signal."""
    assert checks.probe('print("noise")\nprint("{\\"a\\": 1}")') == ({"a": 1}, "")
    assert checks.probe("raise ImportError('torchvision::nms')") == (
        None,
        "ImportError: torchvision::nms",
    )
    facts, reason = checks.probe("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert facts is None
    assert "signal 4" in reason


def test_media_package_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """It breaks vLLM's imports as well, so it is bad; if it is absent all is well."""
    absent = checks.media("no_such_package")
    assert (absent.state, absent.reason) == ("ok", "not installed, not needed")
    monkeypatch.setattr(checks, "find_spec", lambda _name: object())
    finding = checks.media("no_such_package")
    assert finding.state == "bad"
    assert "uninstall" in finding.reason


def test_commands_import_neither_torch_nor_vllm() -> None:
    """`status` is there at once; `doctor` asks in processes of its own."""
    code = (
        "import sys; import flying_serving.cli.admin, flying_serving.cli.checks\n"
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
