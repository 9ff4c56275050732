"""`flying-serving plot` on directories as `bench` writes them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flying_lab.bench import replay
from flying_lab.bench.report import load
from flying_lab.bench.report.load import MeasuredSystem
from flying_lab.errors import BenchError
from flying_serving.cli import lab  # noqa: F401 - adds its commands
from flying_serving.cli.admin import app
from flying_serving.errors import ConfigError
from tests.unit.lab.bench.report.systems import system


def kept(one: MeasuredSystem, directory: Path) -> Path:
    """Write a system's results as `bench` does."""
    assert one.log is not None
    rows = [
        {
            "number": s.number,
            "time": s.time_s,
            "from": s.old,
            "to": s.new,
            "cutover_ms": s.cutover_ms,
        }
        for s in one.log.switches
    ]
    log = {"layout": one.log.layout, "devices_per_engine": 1, "switches": rows}
    replay.save(directory, one.results, one.summary, log)
    return directory


@pytest.mark.deep
def test_one_server(tmp_path: Path) -> None:
    """All figures and the page, beside the results or elsewhere."""
    results = kept(system("auto", 20.0, requests=5), tmp_path / "run")
    done = CliRunner().invoke(
        app, ["plot", str(results), "--out", str(tmp_path / "new" / "out"), "--format", "png"]
    )
    assert done.exit_code == 0, done.output
    written = [
        "bars.png",
        "distributions.png",
        "gaps_at_switches.png",
        "over_time.png",
        "report.html",
    ]
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == written
    assert all(str(tmp_path / "new" / "out" / name) in done.output for name in written)


def test_several_in_the_order_of_the_comparison_or_of_their_names(tmp_path: Path) -> None:
    """`compare.json` says the order; without it every directory with results counts."""
    kept(system("b", 20.0, requests=3), tmp_path / "b")
    kept(system("a", requests=3), tmp_path / "a")
    assert [one.name for one in load.comparison(tmp_path)] == ["a", "b"]
    started = {name: {"command": ["x"], "ready_s": 1.0} for name in ("b", "a")}
    (tmp_path / "compare.json").write_text(json.dumps({"systems": started}))
    found = load.comparison(tmp_path)
    assert [(one.name, len(one.switches)) for one in found] == [("b", 1), ("a", 0)]
    (tmp_path / "a" / "summary.json").unlink()
    assert load.comparison(tmp_path)[1].summary["completed"] == 3


def test_missing_or_unreadable_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no results\.parquet here"):
        load.comparison(tmp_path / "missing")
    results = kept(system("auto", requests=3), tmp_path / "run")
    failed = CliRunner().invoke(app, ["plot", str(results), "--format", "gif"])
    assert isinstance(failed.exception, ConfigError) and "--format='gif'" in str(failed.exception)
    failed = CliRunner().invoke(
        app, ["plot", str(results), "--out", str(results / "results.parquet" / "x")]
    )
    assert isinstance(failed.exception, ConfigError) and "--out=" in str(failed.exception)
    (tmp_path / "compare.json").write_text("[]")
    with pytest.raises(BenchError, match="not written by"):
        load.comparison(tmp_path)
    (results / "results.parquet").write_bytes(b"no")
    with pytest.raises(BenchError, match="no results of"):
        load.comparison(results)
