"""`flying-serving bench` as a user runs it, and what it says to wrong options."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from flying_lab.bench.options import BenchOptions, WorkloadOptions
from flying_lab.bench.plan import workload_of
from flying_lab.errors import BenchError, WorkloadError
from flying_lab.results.results import Results
from flying_lab.workload import files
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.synth import KINDS
from flying_serving.cli import lab  # noqa: F401 - adds its commands
from flying_serving.cli.admin import app
from flying_serving.cli.flags import parse
from flying_serving.errors import ConfigError, FlyingError
from flying_serving.slo import Slo
from harness import mock_server as mock

ROOT = Path(__file__).parents[4]
CODE = ROOT / "tests" / "unit" / "lab" / "workload" / "data" / "azure_code.csv"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    line = [sys.executable, "-m", "flying_serving.cli.main", "bench", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.deep
def test_a_trace_from_the_command_line_to_the_results(mock_url: str, tmp_path: Path) -> None:
    """The workload is saved and replayed from its file; parquet, summary and table agree."""
    out = tmp_path / "out"
    done = command(
        *("--url", mock_url + "/v1", "--trace", str(CODE), "--limit", "30", "--time-scale", "0.01"),
        *(
            "--max-prompt-tokens",
            "100",
            "--max-output-tokens",
            "3",
            "--slo",
            "ttft:60000",
            "--out",
            str(out),
        ),
    )
    assert done.returncode == 0, done.stderr
    assert (
        "30 requests" in done.stdout and "30: 30 completed, 0 failed, 0 unfinished" in done.stdout
    )
    assert "goodput requests/s" in done.stdout and "TTFT" in done.stdout
    kept, results = read_workload(out / "workload.jsonl"), Results.load(out / "results.parquet")
    assert len(kept.requests) == len(results) == 30
    assert results.floats("arrival_s").tolist() == [request.arrival_s for request in kept.requests]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["completed"] == 30 and summary["total_output_tokens"] == kept.output_tokens
    again = command("--url", mock_url, "--trace", str(out / "workload.jsonl"), "--out", str(out))
    assert again.returncode == 2 and "there are results already" in again.stderr


def test_a_synthesised_workload_as_json(mock_url: str, tmp_path: Path) -> None:
    """JSON alone on stdout; phases in it."""
    done = command(
        *(
            "--url",
            mock_url,
            "--synth",
            "alternating",
            "--set",
            "requests=30",
            "--set",
            "low_rate_rps=100",
        ),
        *("--set", "burst_rate_rps=400", "--set", "low_s=0.1", "--set", "burst_s=0.05"),
        *("--set", "prompt_tokens=5:9", "--set", "output_tokens=2:2", "--priority-share", "0.5"),
        *("--out", str(tmp_path), "--json", "--save-timed-trace", str(tmp_path / "timed.jsonl")),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["completed"] == 30 and set(summary["phases"]) == {"low", "burst"}
    assert set(summary["priorities"]) == {"-1", "0"}
    assert len((tmp_path / "timed.jsonl").read_text().splitlines()) == 30


def test_requests_that_fail_are_told(mock_url: str, tmp_path: Path) -> None:
    """A replay that completes nothing is not a success."""
    done = command(
        *("--url", mock_url, "--synth", "poisson", "--set", "requests=3", "--set", "rate_rps=1000"),
        *("--set", "prompt_tokens=5000:5000", "--set", "output_tokens=9:9"),
        *("--extra-body", '{"max_tokens": 2}', "--out", str(tmp_path)),
    )
    assert done.returncode == 1
    assert "3 of 3 requests need more than the 4096 tokens of mock-model" in done.stderr
    assert "0 completed, 0 failed, 3 unfinished" in done.stdout
    assert "3 x 2 of 9 tokens received, finish_reason length" in done.stdout
    assert (
        Results.load(tmp_path / "results.parquet").texts("error")[0]
        == "2 of 9 tokens received, finish_reason length"
    )


@pytest.mark.deep
def test_interrupted_replay_keeps_its_records(tmp_path: Path) -> None:
    """SIGINT ends the replay: the results are written, and what was not sent counts as
    unfinished.
    """
    path, out = tmp_path / "workload.jsonl", tmp_path / "out"
    requests = (Request(0, 0.0, 8, 2), Request(1, 0.1, 8, 2), Request(2, 1000.0, 8, 2))
    files.save(Workload("slow", 0, requests), path)
    line = [
        sys.executable,
        "-m",
        "flying_serving.cli.main",
        "bench",
        "--trace",
        str(path),
        "--out",
        str(out),
    ]
    with mock.running() as url:
        run = subprocess.Popen(
            [*line, "--url", url], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while run.poll() is None and len(httpx.get(url + "/seen").json()) < 3:  # one is the probe
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, stderr = run.communicate(timeout=60)
    assert b"Traceback" not in stderr
    results = Results.load(out / "results.parquet")
    assert results.texts("status")[2] == "unfinished" and results.texts("error")[2] == "not sent"
    assert json.loads((out / "summary.json").read_text())["num_prompts"] == 3


def test_no_server_is_exit_code_1_and_one_line(tmp_path: Path) -> None:
    run = [
        "bench",
        "--url",
        "http://127.0.0.1:1",
        "--synth",
        "paper",
        "--set",
        "requests=1",
        "--out",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 1
    assert "http://127.0.0.1:1/v1/models: no server answers" in done.output


@pytest.mark.deep
def test_the_log_of_switches_is_kept_or_told_to_be_missing(
    mock_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any server that has one; results stay whatever becomes of it."""
    log = {"layout": [[0]], "devices_per_engine": 1, "switches": []}

    def gone(_: object) -> None:
        raise BenchError("the log of switches cannot be read")

    line = [
        "bench",
        "--url",
        mock_url,
        "--synth",
        "poisson",
        "--set",
        "requests=2",
        "--set",
        "rate_rps=100",
    ]
    line += ["--set", "output_tokens=2:2", "--out"]
    monkeypatch.setattr("flying_lab.bench.switchlog.fetch", lambda _: log)
    assert CliRunner().invoke(app, [*line, str(tmp_path / "kept")]).exit_code == 0
    assert json.loads((tmp_path / "kept" / "switches.json").read_text()) == log
    monkeypatch.setattr("flying_lab.bench.switchlog.fetch", gone)
    done = CliRunner().invoke(app, [*line, str(tmp_path / "gone")])
    assert done.exit_code == 0 and "the log of switches cannot be read" in done.stderr
    assert (tmp_path / "gone" / "summary.json").exists() and not (
        tmp_path / "gone" / "switches.json"
    ).exists()


def test_a_dry_run_only_saves(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    run = [
        "bench",
        "--synth",
        "gamma",
        "--set",
        "requests=7",
        "--dry-run",
        "--save-workload",
        str(path),
    ]
    done = CliRunner().invoke(app, [*run, "--out", str(tmp_path / "none")])
    assert done.exit_code == 0, done.output
    assert len(read_workload(path).requests) == 7
    assert not (tmp_path / "none").exists()


def test_help_names_every_generator() -> None:
    """The help text is written out, so that `--help` imports nothing large."""
    shown = " ".join(CliRunner().invoke(app, ["bench", "--help"]).output.split())
    assert all(kind in shown for kind in KINDS)


def test_the_other_commands_do_not_wait_for_this_one() -> None:
    """Neither numpy nor pyarrow is imported until a benchmark runs."""
    code = (
        "import sys; import flying_lab.cli.bench; sys.exit(bool({'numpy', 'pyarrow'} & "
        "set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_workload_is_cut_scaled_clipped_and_mixed_in_this_order() -> None:
    """A window is in the trace's own seconds, the limit counts inside it."""
    cut = {"trace": CODE, "window": "1:60", "limit": 20, "time_scale": 2.0, "prompt_scale": 0.5}
    mixed = {"max_prompt_tokens": 1000, "priority_share": 0.5, "long_prompts": "10:5000:7"}
    made = workload_of(parse(WorkloadOptions, cut | mixed))
    whole = read_workload(CODE)
    inside = [request for request in whole.requests if 1 <= request.arrival_s < 60][:20]
    short = [request for request in made.requests if request.prompt_tokens != 5000]
    assert [request.arrival_s for request in short] == [
        (request.arrival_s - 1) * 2 for request in inside
    ]
    halves = [min(1000, max(1, round(request.prompt_tokens * 0.5))) for request in inside]
    assert [request.prompt_tokens for request in short] == halves
    assert {request.priority for request in short} == {0, -1}
    assert len(made.requests) > 20 and made.requests[-1].arrival_s <= made.duration_s


def test_ranges_and_objects_are_parsed() -> None:
    workload = parse(WorkloadOptions, {"window": "1.5:inf", "long_prompts": "1:2:3"})
    assert workload.window == (1.5, float("inf"))
    assert workload.long_prompts == (1.0, 2, 3)
    made = parse(BenchOptions, {"token_ids": "5:9", "extra_body": '{"top_k": 1}', "slo": "ttft:5"})
    assert made.token_ids == (5, 9)
    assert made.extra_body == {"top_k": 1}
    assert made.slo == Slo(ttft=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": "5"}, "--window='5': START:END is expected"),
        ({"token_ids": "5:x"}, "--token-ids='5:x': FIRST:LAST is expected"),
        ({"token_ids": "5:5"}, "at least two token ids"),
        ({"token_ids": "-5:5"}, "greater than or equal to 0"),
        ({"long_prompts": "0:5:5"}, "--long-prompts='0:5:5': Input should be greater than 0"),
        ({"extra_body": "{"}, "--extra-body='{': a JSON object is expected"),
        ({"extra_body": "[]"}, "--extra-body='\\[\\]': .*dictionary"),
        ({"slo": "itl:5"}, "--slo='itl:5'"),
        ({"time_scale": 0.0}, "--time-scale=0.0"),
        ({"prompt_scale": float("inf")}, "--prompt-scale=inf"),
        ({"trace_format": "csv"}, "--trace-format='csv': .*'azure'"),
        ({"priority_share": 2.0}, "--priority-share=2.0"),
        ({"timeout_s": float("nan")}, "--timeout-s=nan"),
    ],
)
def test_options_out_of_range_name_their_flag(options: dict[str, Any], message: str) -> None:
    model = (
        WorkloadOptions if options.keys() <= WorkloadOptions.model_fields.keys() else BenchOptions
    )
    with pytest.raises(ConfigError, match=message):
        parse(model, options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigError, "--trace FILE or --synth KIND"),
        ({"trace": CODE, "synth": "paper"}, ConfigError, "not both"),
        (
            {"trace": CODE, "parameters": ["requests=5"]},
            ConfigError,
            "--set='requests=5': only --synth",
        ),
        ({"synth": "paper", "parameters": ["requests"]}, ConfigError, "NAME=VALUE"),
        (
            {"synth": "paper", "parameters": ["requests=5", "requests=6"]},
            ConfigError,
            "each name once",
        ),
        (
            {"synth": "sine"},
            WorkloadError,
            "synth='sine': one of paper, poisson, gamma, alternating",
        ),
        ({"synth": "paper", "parameters": ["requests=x"]}, WorkloadError, "requests='x'"),
        (
            {"synth": "paper", "parameters": ["rate_rps=5"]},
            WorkloadError,
            "rate_rps='5': paper has only",
        ),
        ({"synth": "paper", "parameters": ["prompt_tokens=5"]}, WorkloadError, "prompt_tokens='5'"),
        ({"trace": Path("missing.csv")}, WorkloadError, "missing.csv"),
        ({"trace": CODE, "window": "5000:6000"}, WorkloadError, "window"),
    ],
)
def test_workloads_that_cannot_be_made_say_what_is_wrong(
    options: dict[str, Any], error: type[FlyingError], message: str
) -> None:
    with pytest.raises(error, match=message):
        workload_of(parse(WorkloadOptions, options))


def test_a_client_that_fell_behind_is_told_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flying_lab.results.lag.MOST_LAG_MS", -1.0)
    with mock.running() as url:
        run = [
            "bench",
            "--url",
            url,
            "--synth",
            "poisson",
            "--set",
            "requests=2",
            "--set",
            "rate_rps=100",
        ]
        done = CliRunner().invoke(
            app, [*run, "--set", "output_tokens=2:2", "--out", str(tmp_path), "--json"]
        )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["client_behind"] is True
    assert "the client fell behind" in done.stderr
