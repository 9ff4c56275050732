"""Comparisons of servers: with mock servers every way to end, and live against ours and stock
vLLM.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flying_deploy.ports import ReservedPort
from flying_lab.bench import compare
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.report import load
from flying_lab.bench.report.figures import over_time
from flying_lab.bench.servers import ServerArgs
from flying_lab.results.results import Results
from flying_lab.workload.model import Request, Workload
from flying_serving.cli import lab  # noqa: F401 - adds its commands
from flying_serving.cli.admin import app
from flying_serving.cli.flags import parse
from flying_serving.errors import ConfigError, ServerFailed
from harness import mock_server as mock
from harness.live import ENVIRONMENT, FLAGS, ROOT, tiny
from tests.unit.lab.bench.report.systems import band_edges

THREE = Workload("three", 0, tuple(Request(n, n * 0.01, 8, 2) for n in range(3)))
ENDLESS = Workload("endless", 0, (Request(0, 0.0, 8, 2), Request(1, 1000.0, 8, 2)))


class Fake:
    """In place of a server process: a mock server, or one that does not start."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken
        self.stack = ExitStack()
        self.ended = False

    def __enter__(self) -> "Fake":
        self.port = self.stack.enter_context(ReservedPort())
        self.url = self.stack.enter_context(mock.running())
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.stack.close()

    def wait_until_ready(self, timeout_s: float) -> float:
        """Return a time, or fail."""
        if self.broken:
            raise ServerFailed("the server ended with code 3")
        return 1.5


Fakes = dict[str, Fake]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Return the servers by name as they are started; `auto` does not start."""
    started: Fakes = {}

    def start(name: str, *_: object) -> Fake:
        started[name] = Fake(broken=name == "auto")
        return started[name]

    monkeypatch.setattr(compare.servers, "start", start)
    yield started
    assert all(fake.ended for fake in started.values())


def run(names: str, out: Path, workload: Workload = THREE, **options: Any) -> int:
    """Return the exit code of a comparison."""
    made = parse(BenchOptions, {"compare": names, **options})
    return compare.run(
        made, ServerArgs("model", 1, 1, (), ()), workload, out, Console(stderr=True, width=200)
    )


def test_each_system_replays_the_same_and_the_report_has_them_in_order(
    fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results of each in a directory of its own."""
    assert run("stock-tp,static-dp", tmp_path) == 0
    assert list(fakes) == ["stock-tp", "static-dp"]
    for name in fakes:
        assert len(Results.load(tmp_path / name / "results.parquet")) == 3
        assert json.loads((tmp_path / name / "summary.json").read_text())["completed"] == 3
    systems = load.comparison(tmp_path)
    assert [one.name for one in systems] == ["stock-tp", "static-dp"]
    assert all(
        one.started is not None and one.started.ready_s == 1.5 and one.log is None
        for one in systems
    )
    page = (tmp_path / "report.html").read_text()
    assert page.index("stock-tp") < page.index("static-dp") and "flying_serving.cli.main" in page
    shown = capsys.readouterr().err
    assert (
        "stock-tp: ready after 1.5 s" in shown
        and "3/3" in shown
        and "report.html: the report" in shown
    )


def test_a_system_that_does_not_start_is_told_and_the_others_are_measured(
    fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1; without any results there is no report."""
    assert run("auto,manual", tmp_path, as_json=True) == 1
    captured = capsys.readouterr()
    assert "flying-serving: auto: the server ended with code 3" in captured.err
    assert list(json.loads(captured.out)) == ["manual"]
    assert [one.name for one in load.comparison(tmp_path)] == ["manual"]
    assert run("auto", tmp_path / "manual") == 1
    assert not (tmp_path / "manual" / "report.html").exists()


def when(condition: Callable[[], bool], number: signal.Signals) -> threading.Thread:
    """Send this process a signal as soon as something holds."""

    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_server_and_keeps_the_records(
    number: signal.Signals, fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other server is started."""

    def one_is_served() -> bool:
        try:
            return len(httpx.get(fakes["load"].url + "/seen").json()) >= 2  # one is the probe
        except (KeyError, AttributeError, httpx.HTTPError):
            return False

    sender = when(one_is_served, number)
    assert run("load,static-dp", tmp_path, ENDLESS) == 130
    sender.join()
    assert list(fakes) == ["load"] and fakes["load"].ended
    assert Results.load(tmp_path / "load" / "results.parquet").texts("error")[1] == "not sent"
    assert (tmp_path / "report.html").exists()
    assert "ended early" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--compare", "auto"], "--compare needs"),
        (["--", "model"], "only --compare starts servers"),
        (
            ["--compare", "auto,auto", "--", "m"],
            "--compare='auto,auto': .* each once, of auto, .* stock-tp",
        ),
        (["--compare", "auto,fast", "--", "m"], "--compare='auto,fast'"),
        (["--compare", "auto", "--", "m", "--port=5"], "^--port='5' after --"),
    ],
)
def test_comparisons_that_cannot_be_made_end_before_anything_starts(
    line: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, ["bench", *line])
    assert isinstance(done.exception, ConfigError) and re.search(message, str(done.exception))


def test_arguments_behind_the_dashes_are_the_servers(fakes: Fakes, tmp_path: Path) -> None:
    """From the command line; what is there already is not written over."""
    line = [
        "bench",
        "--compare",
        "static-tp",
        "--synth",
        "poisson",
        "--set",
        "requests=2",
        "--set",
        "rate_rps=100",
    ]
    line += ["--set", "output_tokens=2:2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*line, "--", "model", "--dtype=float32"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "static-tp" / "results.parquet").exists()
    again = CliRunner().invoke(app, [*line, "--", "model"])
    assert isinstance(again.exception, ConfigError) and "there are results already" in str(
        again.exception
    )


@pytest.mark.server
def test_the_band_lines_up_with_an_order_given_during_the_replay(tmp_path: Path) -> None:
    """Ours and stock vLLM: an operator changes the layout, and the drawn edge lies between order
    and answer.
    """
    model = tiny("llama")
    out, log = tmp_path / "out", tmp_path / "out" / "manual" / "server.log"
    line = [
        sys.executable,
        "-m",
        "flying_serving.cli.main",
        "bench",
        "--compare",
        "manual,stock-tp",
        "--out",
        str(out),
    ]
    line += [
        "--synth",
        "alternating",
        "--set",
        "duration_s=6",
        "--set",
        "low_rate_rps=2",
        "--set",
        "burst_rate_rps=6",
    ]
    line += [
        "--set",
        "low_s=2",
        "--set",
        "burst_s=1",
        "--set",
        "prompt_tokens=8:64",
        "--set",
        "output_tokens=8:32",
    ]
    line += [
        "--token-ids",
        "10:200",
        "--slo",
        "ttft:60000",
        "--",
        str(model),
        "--data-parallel-size=2",
    ]
    line += ["--enforce-eager"]  # stock vLLM would compile for a minute
    line += [flag for flag in FLAGS if not flag.startswith(("--policy", "--logits"))]
    with subprocess.Popen(
        line, cwd=ROOT, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as run:
        url = None
        while url is None and run.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text()) if log.exists() else None
            url = found[0] if found else None
            time.sleep(0.1)
        while run.poll() is None and not _busy(str(url)):
            time.sleep(0.05)
        ordered_s = time.time()
        answer = httpx.post(f"{url}/flying/layout", json={"groups": [[0, 1]]}, timeout=60)
        answered_s = time.time()
        assert answer.status_code == 200, answer.text
        _, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    systems = load.comparison(out)
    assert [(one.name, len(one.switches), bool(one.results.ok.all())) for one in systems] == [
        ("manual", 1, True),
        ("stock-tp", 0, True),
    ]
    began_s = systems[0].results.run.started_wall_s
    edges = band_edges(over_time(systems))
    assert len(edges) == 3 and edges[0] == 0.0
    assert ordered_s <= began_s + edges[1] <= answered_s
    assert "queue P90" in (out / "report.html").read_text()


def _busy(url: str) -> bool:
    """Whether the server has begun to serve the replay."""
    try:
        metrics = httpx.get(f"{url}/metrics", timeout=5).text
    except httpx.HTTPError:
        return False
    tokens = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", metrics, flags=re.MULTILINE)
    return sum(map(float, tokens)) > 1  # one is the probe's
