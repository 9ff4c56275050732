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
from flying_serving.placement.topology import Topology
from tests.unit.placement.machines import machine

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


@pytest.mark.parametrize(
    ("topology", "state", "reason"),
    [
        (machine(4, 4), "ok", "8"),
        (machine(8, quota_cpus=3.5), "ok", "3, by the quota of the cgroup"),
        (
            machine(1, threads_per_core=2),
            "warn",
            "1: engines share it, so a group is not faster than one engine",
        ),
    ],
    ids=["two nodes", "quota", "one core"],
)
def test_reported_cores_are_the_usable_ones(topology: Topology, state: str, reason: str) -> None:
    found = checks.cores(topology)
    assert found.state == state
    assert found.reason == reason


def test_each_number_of_engines_has_its_placement() -> None:
    rows = checks.placements(machine(2, 2), {})
    assert [row.what for row in rows] == ["1 engine", "2 engines", "4 engines", "8 engines"]
    assert rows[1].reason.splitlines() == [
        "engine 0: node 0, cores 0-1, 2 threads",
        "engine 1: node 1, cores 2-3, 2 threads",
    ]


def test_a_list_of_cores_is_for_one_number_of_engines() -> None:
    rows = checks.placements(machine(4), {"VLLM_CPU_OMP_THREADS_BIND": "0|2"})
    assert [row.state for row in rows] == ["warn", "ok", "warn", "warn"]


def test_a_placement_that_no_number_of_engines_can_have_is_bad() -> None:
    (row,) = checks.placements(machine(4), {"VLLM_CPU_OMP_THREADS_BIND": "0|4"})
    assert row.state == "bad"
    assert row.what == "placement"
    assert "CPU 4 is not one of those that this process may use, 0-3" in row.reason


def test_binding_by_openmp_is_bad_for_every_number_of_engines() -> None:
    (row,) = checks.placements(machine(4), {"OMP_PROC_BIND": "true"})
    assert row.state == "bad"
    assert row.what == "placement"
    assert row.reason.startswith("OMP_PROC_BIND='true': must be unset or 'false'")


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
