"""`flying-serving simulate` as a command: files, tables, JSON, and errors before anything runs."""

import inspect
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flying_lab.bench.report import load
from flying_lab.cli import simulate
from flying_lab.results.results import Results
from flying_lab.sim.cluster import Options
from flying_serving.cli import lab  # noqa: F401 - adds its commands
from flying_serving.cli.admin import app
from flying_serving.config import FlyingConfig
from flying_serving.errors import FlyingError

SMALL = [
    "--model",
    "llama-3-8b",
    "--hardware",
    "h200x2",
    "--synth",
    "paper",
    "--set",
    "requests=30",
]


def run(*arguments: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.deep
def test_tables_and_files(tmp_path: Path) -> None:
    """One row for each system; requests, summaries, layouts and figures in the directory."""
    text = run(*SMALL, "--policy", "auto,stock-tp2", "--out", str(tmp_path / "out"))
    assert "auto" in text and "stock-tp2" in text and "30/30" in text
    kept = Results.load(tmp_path / "out" / "auto" / "results.parquet")
    assert len(kept) == 30 and kept.ok.all()
    auto, fixed = load.comparison(tmp_path / "out")
    assert auto.summary["completed"] == 30 and auto.spans and fixed.name == "stock-tp2"
    for name in (
        "over_time.png",
        "distributions.png",
        "workload.jsonl",
        "report.html",
        "stock-tp2/results.parquet",
    ):
        assert (tmp_path / "out" / name).stat().st_size > 1000


def test_requests_are_split_and_steps_keep_to_a_target() -> None:
    """Gaps between tokens vary less with a target."""
    asked = [*SMALL, "--policy", "split", "--json"]
    found = [json.loads(run(*asked, *target))["split"] for target in ([], ["--tbt-slo-ms", "30"])]
    assert [one["completed"] for one in found] == [30, 30]
    assert found[1]["std_itl_ms"] < found[0]["std_itl_ms"]


def test_clients_may_not_tell_the_server_how_long_outputs_are() -> None:
    """All are served; errors follow from the seed."""
    asked = [*SMALL, "--policy", "split", "--json"]
    found = {
        source: run(*asked, *(["--lengths", source] if source else []))
        for source in ("", "exact", "error-40", "production")
    }
    assert all(json.loads(text)["split"]["completed"] == 30 for text in found.values())
    assert run(*asked, "--lengths", "error-40") == found["error-40"]


def test_groups_divide_tokens_unless_they_are_not_to() -> None:
    """Then the first tokens of long prompts come later."""
    large = ["--model", "llama-3-70b", "--hardware", "h200x8", *SMALL[4:]]
    asked = [*large, "--policy", "auto", "--json"]
    found = [json.loads(run(*asked, *flag))["auto"] for flag in ([], ["--no-token-parallel"])]
    assert found[0]["mean_ttft_ms"] < 0.95 * found[1]["mean_ttft_ms"]


@pytest.mark.deep
def test_nodes_behind_a_router(tmp_path: Path) -> None:
    """Requests of all nodes in one table; the layouts of several are in none of the files."""
    asked = [
        *SMALL,
        "--nodes",
        "3",
        "--router",
        "round-robin",
        "--policy",
        "auto",
        "--out",
        str(tmp_path / "out"),
    ]
    summary = json.loads(run(*asked, "--json"))["auto"]
    assert summary["completed"] == 30
    assert summary["router"] == "round-robin"
    assert summary["node_requests"] == [10, 10, 10]
    assert len(Results.load(tmp_path / "out" / "auto" / "results.parquet")) == 30
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    assert not (tmp_path / "out" / "auto" / "switches.json").exists()


def test_prompts_that_begin_alike_are_computed_once(tmp_path: Path) -> None:
    """If asked, and by a node that had them: which one, says the router."""
    path = tmp_path / "trace.jsonl"
    rows = [(3000 * n, 1024 + 512, [n % 3, 3 + n % 3, 6 + n]) for n in range(12)]
    path.write_text("\n".join(json.dumps(_mooncake(*row)) for row in rows) + "\n")
    asked = [
        "--model",
        "llama-3-8b",
        "--hardware",
        "h200x2",
        "--trace",
        str(path),
        "--policy",
        "stock-tp",
        "--json",
    ]
    assert "prefix_cache_hit_rate" not in json.loads(run(*asked))["stock-tp"]
    found = {
        router: json.loads(run(*asked, "--prefix-caching", "--nodes", "2", "--router", router))[
            "stock-tp"
        ]
        for router in ("cache-aware", "round-robin")
    }
    rates = {router: summary["prefix_cache_hit_rate"] for router, summary in found.items()}
    assert rates == {
        "cache-aware": pytest.approx(9 / 12 * 2 / 3),
        "round-robin": pytest.approx(6 / 12 * 2 / 3),
    }


def _mooncake(timestamp_ms: int, tokens: int, hash_ids: list[int]) -> dict[str, object]:
    return {
        "timestamp": timestamp_ms,
        "input_length": tokens,
        "output_length": 5,
        "hash_ids": hash_ids,
    }


def test_simulated_server_weighs_as_a_live_server() -> None:
    """If nothing is said: otherwise it would answer for another server than the one that is
    started.
    """
    live, simulated = FlyingConfig(), Options()
    assert inspect.signature(simulate.simulate).parameters["horizon_s"].default == live.horizon_s
    assert simulated.horizon_s == live.horizon_s
    assert simulated.slo_s == live.slo_s
    assert simulated.weave_steps == live.weave_steps
    assert simulated.max_pause_s * 1e3 == live.max_pause_ms


def test_json_is_the_same_each_time_for_a_seed() -> None:
    first, second = (run(*SMALL, "--json", "--seed", "5") for _ in range(2))
    assert first == second
    assert set(json.loads(first)) == {"auto", "stock-dp", "stock-tp"}
    assert run(*SMALL, "--json", "--seed", "6") != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "gpt-5"], "model='gpt-5': neither a file nor one of gpt-oss-120b"),
        (["--hardware", "b200x8"], "no such device 'b200'; there are a100x8"),
        (["--policy", "auto,best"], "--policy='best': not one of auto"),
        (["--policy", "auto,auto"], "each once"),
        (["--devices-per-engine", "4"], "--devices-per-engine=4: must be one of 1, 2"),
        (["--set", "requests=none"], "requests"),
        (
            ["--router", "best"],
            "--router='best': Input should be 'cache-aware', 'least-load' or 'round-robin'",
        ),
        (["--lengths", "known"], "--lengths='known': Input should be 'exact', 'error-20'"),
        (["--prefix-caching"], "--prefix-caching: no request of this workload has hash ids"),
        (
            ["--max-num-batched-tokens", "8"],
            "max_num_batched_tokens=8: must be at least max_num_seqs=1024",
        ),
    ],
)
def test_wrong_option_is_refused_before_the_simulation(
    change: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flying_lab.cli import simulation as command

    monkeypatch.setattr(command, "Fleet", lambda *_: pytest.fail("it ran"))
    with pytest.raises(FlyingError) as error:
        run(*SMALL, *change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:17:04.0,-5,10", "trace.csv:3: ContextTokens='-5'"),
        ("yesterday,5,10", "trace.csv:3: TIMESTAMP='yesterday'"),
        ("2023-11-16 18:17:04.0,5", "trace.csv:3: row="),
    ],
)
def test_a_row_that_cannot_be_read_is_named_by_file_line_and_column(
    tmp_path: Path, row: str, message: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.0,100,10\n{row}\n"
    )
    with pytest.raises(FlyingError) as error:
        run("--model", "llama-3-8b", "--hardware", "h200x2", "--trace", str(path))
    assert message in str(error.value)


def test_a_measured_machine_needs_no_model(tmp_path: Path) -> None:
    """`--hardware FILE` says what runs; a model beside it is refused."""
    cost = {"fixed_s": 0.02, "prefill_token_s": 1e-4, "sequence_s": 1e-3, "context_token_s": 0.0}
    path = tmp_path / "machine.json"
    machine = {"source": "a test", "engines": 2, "devices_per_engine": 1, "blocks": 400}
    path.write_text(
        json.dumps(
            machine | {"block_tokens": {"1": 32, "2": 64}, "step_cost": {"1": cost, "2": cost}}
        )
    )
    synthesis = ["--synth", "poisson", "--set", "requests=20", "--set", "rate_rps=2"]
    assert "20/20" in run("--hardware", str(path), *synthesis)
    with pytest.raises(FlyingError, match="leave --model out"):
        run("--hardware", str(path), "--model", "llama-3-8b", *synthesis)
    with pytest.raises(FlyingError, match="--model is needed"):
        run("--hardware", "h200x2", *synthesis)
