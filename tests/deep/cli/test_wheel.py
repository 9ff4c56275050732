"""The wheel has every file of the packages, and a server that is installed from it answers."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from flying_deploy.ports import HOST, ReservedPort
from flying_lab.server_process import CPU_ENVIRONMENT, ServerProcess, command
from harness.live import READY_S, ready_or_stopped, tiny
from supply.pins import ROOT
from supply.wheel import build

PACKAGES = ("flying_serving", "flying_deploy", "flying_lab")
FLAGS = ("--dtype=float32", "--max-model-len=2048", "--kv-cache-memory-bytes=67108864")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
ENVIRONMENT |= CPU_ENVIRONMENT
PLACES = """
import importlib, sys
print(*(importlib.import_module(package).__path__[0] for package in sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and sees the locked packages.

    Those are seen last, so that pip finds none of them, and no `.pth` file of theirs names the
    checkout.
    """
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True)
    programs = root / "bin"
    pip = [sys.executable, "-m", "pip", f"--python={programs / 'python'}"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env=ENVIRONMENT)
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "locked.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return programs


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return set(packed.namelist())


def test_wheel_has_exactly_the_files_of_the_packages(wheel: Path) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "flying_serving/observe/view/page.html" in files
    found = {name for name in names(wheel) if ".dist-info/" not in name and ".data/" not in name}
    assert found == files


def test_wheel_installs_alerts_and_dashboard(wheel: Path) -> None:
    folder = f"{'-'.join(wheel.name.split('-')[:2])}.data/data/share/flying-serving"
    wanted = {f"{folder}/{path.name}" for path in (ROOT / "observability").iterdir()}
    assert wanted == {name for name in names(wheel) if ".data/" in name}


@pytest.mark.server
def test_server_of_the_wheel_answers(installed: Path, tmp_path: Path) -> None:
    """Its code is that of the wheel, with the page and the metrics that files of it describe."""
    ask = [str(installed / "python"), "-c", PLACES, *PACKAGES]
    told = subprocess.run(ask, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert [str(installed.parent) in path for path in told.stdout.split()] == [True] * len(PACKAGES)
    port, model = ReservedPort(), str(tiny("llama"))
    line = [str(installed / "flying-serving"), "serve", model, f"--host={HOST}"]
    line += [f"--port={port.number}", "--data-parallel-size=2", *FLAGS]
    with ServerProcess(command(line, tmp_path), ENVIRONMENT, port, tmp_path / "log") as server:
        ready_or_stopped(server, READY_S)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 4
            assert "<html" in http.get("/flying/").raise_for_status().text
            assert "\nflying:layout_info" in http.get("/metrics").raise_for_status().text
