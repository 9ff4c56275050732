"""What the check of a GPU leaves behind: facts, the table, logs; and when it refuses to run."""

import json
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.cuda_check import __main__ as check
from benchmarks.cuda_check import facts
from benchmarks.cuda_check.lines import Outcome, Result
from benchmarks.cuda_check.report import Report

ONE = Outcome("one", Result.PASSED, "a figure", 2.0)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "01-server.log").write_text("its log")
    return folder


def test_each_line_is_in_the_folder_when_it_is_added(tmp_path: Path, logs: Path) -> None:
    out = tmp_path / "deep" / "out"
    report = Report(out, {"Device": "one"}, logs)
    assert "- Device: one" in (out / "table.md").read_text()
    report.add(ONE)
    assert "| one | passed | a figure | 2 |" in (out / "table.md").read_text()
    (line,) = (out / "lines.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "name": "one",
        "result": "passed",
        "figure": "a figure",
        "took_s": 2.0,
    }
    with tarfile.open(out / "logs.tar.gz") as packed:
        log = packed.extractfile("logs/01-server.log")
        assert log is not None
        assert log.read() == b"its log"
    report.end()
    assert {path.name for path in out.iterdir()} == {"table.md", "lines.jsonl", "logs.tar.gz"}


def test_logs_are_packed_at_the_end_too(tmp_path: Path, logs: Path) -> None:
    report = Report(tmp_path / "out", {}, logs)
    (logs / "02-late.log").write_text("late")
    report.end()
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as packed:
        assert "logs/02-late.log" in packed.getnames()


def test_logs_are_packed_while_a_line_takes_long(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs: list[Path] = []
    monkeypatch.setattr("benchmarks.cuda_check.report.PACK_S", 0.01)
    monkeypatch.setattr(Report, "pack", lambda report: packs.append(logs))
    report = Report(tmp_path / "out", {}, logs)
    while not packs:
        pass
    report.end()


def test_a_program_that_is_missing_leaves_a_fact_unknown() -> None:
    assert facts.said_by(["no-such-program"]) == "unknown"
    assert facts.said_by([sys.executable, "-c", "raise SystemExit(1)"]) == "unknown"
    assert facts.said_by([sys.executable, "-c", "print('a'); print('b')"]) == "a"


def test_check_refuses_a_gpu_that_torch_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["cuda_check", f"--out={tmp_path / 'out'}"])
    assert check.main() == 2
    assert "nvidia-smi is there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_gpu_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert facts.unusable_gpu(has_gpu=False) is None


@pytest.mark.parametrize("target", ["cuda-check", "cuda-test"])
def test_targets_for_a_gpu_install_nothing(target: str) -> None:
    """The locked environment has the CPU's vLLM."""
    makefile = (Path(__file__).parents[3] / "Makefile").read_text(encoding="utf-8")
    assert f"\n{target}:\n\t" in makefile
