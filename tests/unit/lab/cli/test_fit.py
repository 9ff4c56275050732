"""`flying-serving fit`: from a server's status to a machine that `simulate` takes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from flying_lab.sim.machine import from_status, load_measured
from flying_serving.cli import lab  # noqa: F401 - adds its commands
from flying_serving.cli.admin import app
from flying_serving.errors import FlyingError
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepCost

COST = asdict(StepCost(0.02, 1e-4, 1e-3, 1e-8, 2e-3, 1e-5))
"""What `/flying/status` says of a lane."""
STATUS: dict[str, Any] = {
    "policy": "auto",
    "layout": [[0], [1]],
    "group_sizes": [1, 2],
    "devices_per_engine": 1,
    "capacity_tokens": {"1": 12800, "2": 25600},
    "step_cost": {"1": COST, "2": COST | {"fixed_s": 0.012}},
    "migration_cost": {"2": {"fixed_s": 0.001, "token_s": 2e-6}},
    "engines": [{"engine": 0, "blocks": 402}, {"engine": 1, "blocks": 401}],
}


def run(*arguments: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_saved_status_becomes_a_machine(tmp_path: Path) -> None:
    """Blocks of the smallest engine, tokens per block by group size, costs as they are; and it can
    be simulated.
    """
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    out = tmp_path / "machine.json"
    text = run("fit", str(tmp_path / "status.json"), "--out", str(out), "--frontend-ms", "5")
    assert "group size 2: 12.00 ms" in text
    machine = load_measured(out)
    assert machine.engines == 2
    assert machine.blocks == 401
    assert dict(machine.block_tokens) == {1: 32, 2: 64}
    assert (
        machine.step_cost[2].fixed_s == 0.012
        and asdict(machine.step_cost[1]) == COST
        and machine.frontend_s == 0.005
    )
    assert machine.migration(2) == MigrationCost(0.001, 2e-6)
    workload = ["--synth", "poisson", "--set", "rate_rps=2", "--set", "requests=20"]
    assert "20/20" in run(
        "simulate", "--hardware", str(out), "--policy", "auto,stock-dp,stock-tp2", *workload
    )


def test_a_server_whose_kv_does_not_migrate() -> None:
    """Nothing is said of it, or nothing was measured."""
    for status in (
        STATUS | {"migration_cost": {}},
        {key: value for key, value in STATUS.items() if key != "migration_cost"},
    ):
        assert from_status(status, "a test", 0.0).migration(2) is None


def test_a_server_is_asked_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(method: str, url: str, **options: Any) -> httpx.Response:
        asked.append((method, url, options["headers"]))
        return httpx.Response(200, json=STATUS)

    monkeypatch.setattr(httpx, "request", answer)
    run("fit", "http://host:8000/", "--out", str(tmp_path / "m.json"), "--api-key", "secret")
    assert asked == [("GET", "http://host:8000/flying/status", {"Authorization": "Bearer secret"})]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_cost": {"1": COST}}, "no step of group size 2 was measured"),
        ({"migration_cost": {"2": {"fixed_s": -1, "token_s": 0}}}, "migration_cost.2.fixed_s"),
        ({"engines": []}, "no status of a Flying Serving server"),
        ({"engines": [{"engine": 0}]}, "'blocks'"),
        ({"capacity_tokens": {"1": 5}}, "capacity_tokens={1: 5}"),
        ({"step_cost": {"1": COST | {"fixed_s": -1}, "2": COST}}, "step_cost.1.fixed_s"),
    ],
)
def test_malformed_status_is_refused_by_source_and_field(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlyingError) as error:
        from_status(STATUS | change, "status.json", 0.0)
    assert message in str(error.value) and "status.json" in str(error.value)


def test_neither_url_nor_file_is_said_at_once() -> None:
    with pytest.raises(FlyingError, match="neither a URL nor a file"):
        run("fit", "/nowhere.json")
