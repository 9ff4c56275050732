"""The alert rules: by promtool with series as they may be, and by a real Prometheus that scrapes a
live server.
"""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from flying_serving.observe.metrics.table import TABLE
from harness.live import WAIT_S, Server, wait_until
from harness.losing import is_whole, kill, lost, process
from tests.deep.observability.dashboards import DASHBOARD, OBSERVABILITY, expressions
from tests.deep.observability.programs import Prometheus, promtool
from tests.stock.requests import tokens

ALERTS, EXAMPLE = OBSERVABILITY / "alerts.yml", OBSERVABILITY / "prometheus.yml"
CASES = Path(__file__).with_name("alerts.test.yml")
SECONDS = {"s": 1, "m": 60}


def rules(path: Path = ALERTS) -> dict[str, dict[str, Any]]:
    """Every alert by name."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_rules_and_example_are_valid_by_prometheus_own_checks() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", ALERTS)
    assert "is valid prometheus config file syntax" in promtool("check", "config", EXAMPLE)


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    """With thresholds and durations as they are in the file."""
    promtool("test", "rules", CASES)
    assert {
        case["alertname"]
        for test in yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    } == set(rules())


# ---- a real Prometheus and a live server


def impatient(path: Path, port: int) -> Path:
    """Our example for another port, scraping every second; the rules with 2 s in place of all times
    in them.
    """
    text = ALERTS.read_text(encoding="utf-8")
    text = re.sub(
        r"(_seconds) > \d+$",
        r"\1 > 2",
        re.sub(r"for: \d+[sm]$", "for: 2s", text, flags=re.M),
        flags=re.M,
    )
    (path / "alerts.yml").write_text(text, encoding="utf-8")
    changed = {name for name, rule in rules(path / "alerts.yml").items() if rule != rules()[name]}
    assert changed >= {"FlyingServerDown", "FlyingEngineSilent", "FlyingTaskPoolTooOld"}
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return path / "prometheus.yml"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = (
        "--policy=auto",
        "--max-num-seqs=1",
        "--collective-timeout-s=240",
        "--engine-timeout-s=240",
    )
    with Server("llama", 2, *flags) as live:
        yield live


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(impatient(tmp_path_factory.mktemp("prometheus"), server.port.number)) as live:
        yield live


def complete(
    server: Server, seed: int, max_tokens: int, over: threading.Event | None = None
) -> int:
    """The status of a completion; with `over`, of a stream that its client leaves then."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": tokens(seed, 50),
        "stream": over is not None,
    }
    body |= {"max_tokens": max_tokens, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        for _ in answer.iter_lines():
            if over is not None and over.is_set():
                break
    return answer.status_code


@pytest.mark.server
def test_prometheus_scrapes_every_metric(server: Server, prometheus: Prometheus) -> None:
    """All that have samples from the start; a switch there need not have been yet."""
    wait_until(
        lambda: prometheus.query('up{job="flying-serving"} == 1'), lambda: prometheus.query("up")
    )
    complete(server, 1, 10)

    def names() -> set[str]:
        found = prometheus.query('count by (__name__) ({__name__=~"flying.*"})')
        return {re.sub("_(bucket|sum|count)$", "", one["metric"]["__name__"]) for one in found}

    expected = {family.name for family in TABLE} - {"flying:switches_total"}
    wait_until(lambda: expected <= names(), lambda: expected - names())
    assert names() - expected <= {"flying:switches_total"}
    assert prometheus.firing() == {}


@pytest.mark.server
def test_prometheus_answers_every_expression_of_the_dashboard(prometheus: Prometheus) -> None:
    """Those of rates need two scrapes; those of predictions, a switch for load."""
    known = [e for e in expressions(DASHBOARD) if not re.search("predict|> 0$|switches_total", e)]

    def unanswered() -> list[str]:
        return [expression for expression in known if not prometheus.query(expression)]

    wait_until(lambda: not unanswered(), unanswered)
    for expression in set(expressions(DASHBOARD)) - set(known):
        prometheus.query(expression)


@pytest.mark.server
def test_an_old_request_in_the_pool_fires(server: Server, prometheus: Prometheus) -> None:
    """Two engines with one slot each have six long requests: the last waits until the alert fires
    and all leave.
    """
    fired = threading.Event()
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(complete, server, seed, 1900, fired) for seed in range(2, 8)]
        wait_until(
            lambda: "FlyingTaskPoolTooOld" in prometheus.firing(),
            lambda: prometheus.query("flying:pool_requests"),
        )
        labels = prometheus.firing()["FlyingTaskPoolTooOld"]
        fired.set()
        assert labels["instance"] == f"127.0.0.1:{server.port.number}"
        assert {request.result(2 * WAIT_S) for request in asked} == {200}
    wait_until(lambda: "FlyingTaskPoolTooOld" not in prometheus.firing(), prometheus.firing)


@pytest.mark.server
def test_an_engine_that_does_not_answer_fires(server: Server, prometheus: Prometheus) -> None:
    """Its process is stopped. The alert ends when it goes on."""
    engine = process(server, 1)
    engine.suspend()
    try:
        wait_until(lambda: "FlyingEngineSilent" in prometheus.firing(), prometheus.firing)
        labels = prometheus.firing()["FlyingEngineSilent"]
    finally:
        engine.resume()
    assert labels["engine"] == "1"
    wait_until(lambda: "FlyingEngineSilent" not in prometheus.firing(), prometheus.firing)
    assert complete(server, 7, 5) == 200


@pytest.mark.server
def test_a_lost_engine_fires_and_has_no_gauges(server: Server, prometheus: Prometheus) -> None:
    """Its requests, which go on elsewhere, are not shown as its own; vLLM's gauges show it idle."""
    over = threading.Event()

    def running() -> dict[tuple[str, ...], float]:
        return server.metric("vllm:num_requests_running", "engine")

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(complete, server, seed, 1900, over) for seed in range(2, 6)]
        wait_until(lambda: sum(running().values()) == len(server.status()["layout"]), running)
        with lost(server, 1):
            assert server.metric("flying:engine_up", "engine") == {("0",): 1, ("1",): 0}
            wait_until(lambda: running()[("1",)] == 0, running)
            for gauge in ("engine_degree", "engine_unanswered_seconds", "lent_weight_bytes"):
                assert set(server.metric(f"flying:{gauge}", "engine")) == {("0",)}
            orphaned = server.metric("flying:orphaned_requests_total", "outcome")
            assert orphaned[("requeued",)] >= 1 and orphaned[("failed",)] == 0
            wait_until(lambda: "FlyingEngineLost" in prometheus.firing(), prometheus.firing)
        over.set()
        assert {request.result(2 * WAIT_S) for request in asked} == {200}
    assert prometheus.firing()["FlyingEngineLost"]["engine"] == "1"
    assert server.metric("flying:engine_up", "engine") == {("0",): 1, ("1",): 1}
    assert server.metric("flying:engine_back_seconds_count") == {(): 1}
    assert server.metric("flying:engine_losses_total", "engine", "reason")[("1", "ended")] == 1
    assert "FlyingEngineCrashLoop" not in prometheus.firing()


@pytest.mark.server
def test_an_engine_that_is_lost_again_and_again_fires(
    server: Server, prometheus: Prometheus
) -> None:
    """Two more times after the test before."""
    for _ in range(2):
        kill(server, 1)
        wait_until(lambda: is_whole(server), server.log)
    wait_until(lambda: "FlyingEngineCrashLoop" in prometheus.firing(), prometheus.firing)
    assert prometheus.firing()["FlyingEngineCrashLoop"]["engine"] == "1"


@pytest.mark.server
def test_a_server_that_is_killed_fires(server: Server, prometheus: Prometheus) -> None:
    """The last of these tests, for that reason."""
    server.process.kill()
    wait_until(lambda: "FlyingServerDown" in prometheus.firing(), prometheus.firing)
    assert prometheus.firing()["FlyingServerDown"]["job"] == "flying-serving"
