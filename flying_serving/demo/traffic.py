"""The demo's second part: low, burst, low, with policy `auto` and with both fixed layouts. Nobody gives orders."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from rich.console import Console

from flying_serving.bench.client import INTERRUPTED, Replay, Target
from flying_serving.bench.metrics import summarise
from flying_serving.bench.results import Results
from flying_serving.bench.run import Settings, measure, probe
from flying_serving.demo.gains import decisions_table, gains_table, phase_lines, switch_lines, verdicts
from flying_serving.demo.server import DemoServer
from flying_serving.demo.tiny import make_model
from flying_serving.workload.files import save
from flying_serving.workload.model import Workload
from flying_serving.workload.read import read_workload
from flying_serving.workload.synth import Alternating, synthesise

ENGINES = 4
KV_BYTES = 2**28
AUTO = "auto"
POLICIES = (AUTO, "static-dp", "static-tp")
TRAFFIC = Alternating(
    duration_s=40.0,
    low_rate_rps=1.0,
    burst_rate_rps=8.0,
    low_s=15.0,
    burst_s=10.0,
    prompt_tokens=(64, 256),
    output_tokens=(16, 48),
)
SEED = 1
SETTINGS = Settings(vocabulary=range(300, 8000), timeout_s=300.0)
ASK_S = 30.0
POLL_S = 0.25

Json = dict[str, Any]


def run(console: Console, models: Path) -> list[str]:
    """Replay one file against a server of each policy, one after the other, and compare. Returns what was wrong."""
    model = make_model(models / "llama-75m", "llama-75m")
    path = models / "low-burst-low.jsonl"
    save(synthesise(TRAFFIC, SEED), path)
    console.print(f"the same requests for {len(POLICIES)} servers, one after the other; they are in {path}")
    results: dict[str, Results] = {}
    switches: dict[str, list[Json]] = {}
    wrong: list[str] = []
    for policy in POLICIES:
        server = DemoServer(model, ENGINES, policy, KV_BYTES)
        try:
            ready_s = server.wait_until_ready(console)
            console.print(f"policy {policy}: {ENGINES} engines ready in {ready_s:.1f} s")
            results[policy] = _replay(console, server.url, policy, read_workload(path))
            with _client(server.url) as http:
                switches[policy] = _switches(http)
            wrong += [f"{policy}: {line}" for line in _problems(server.url, results[policy], switches[policy])]
        finally:
            stopped = server.stop()
        wrong += [] if stopped else [f"{policy}: the server had to be killed"]
    summaries = {policy: summarise(result) for policy, result in results.items()}
    console.print(gains_table(summaries), *verdicts(summaries), sep="\n")
    console.print(decisions_table(switches[AUTO], results[AUTO].run.started_wall_s))
    return wrong


def _replay(console: Console, url: str, policy: str, workload: Workload) -> Results:
    """Replay a workload, and tell what happens meanwhile."""
    target = Target(url)
    served = probe(target, SETTINGS)
    with _Feed(console, url, policy, workload) as feed:
        results = measure(workload, target, served, SETTINGS, watch=feed.look)
        with _client(url) as http:
            feed.show(_switches(http), results.run.started_wall_s, results.run.duration_s)
    if INTERRUPTED in results.texts("error"):
        raise KeyboardInterrupt
    return results


def _client(url: str) -> httpx.Client:
    """One is enough for all questions: to make one takes 50 ms of a core that engines want."""
    return httpx.Client(base_url=url, timeout=ASK_S, trust_env=False)


def _switches(http: httpx.Client) -> list[Json]:
    """What the server tells of its switches."""
    answer = http.get("/flying/switches").raise_for_status()
    records: list[Json] = answer.json()["switches"]
    return records


def _problems(url: str, results: Results, switches: list[Json]) -> list[str]:
    """Requests that failed or were cut short, switches that did, and block bookkeeping that does not add up."""
    found = [f"request {number}: {error}" for number, error in enumerate(results.texts("error")) if error is not None]
    found += [f"switch {record['number']}: {record['problem']}" for record in switches if record["problem"] is not None]
    check = httpx.post(f"{url}/flying/check", json={}, timeout=ASK_S, trust_env=False)
    return found if check.status_code == 200 else [*found, f"block bookkeeping: {check.text}"]


class _Feed:
    """Tells what happens in a replay: a line that changes, and with policy `auto` one for each phase and each switch.

    The server is asked in a thread, so that the replay never waits for the answer.
    """

    def __init__(self, console: Console, url: str, policy: str, workload: Workload) -> None:
        self._console = console
        self._url = url
        self._policy = policy
        self._phases = phase_lines(workload) if policy == AUTO else []
        self._requests = len(workload.requests)
        self._printed: set[str] = set()
        self._switches: list[Json] = []
        self._status = console.status(policy)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> _Feed:
        self._status.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._status.stop()

    def look(self, replay: Replay) -> None:
        """Half a second has passed."""
        self._status.update(
            f"{self._policy}, {replay.elapsed_s:.0f} s: {replay.sent} of {self._requests} requests sent, "
            f"{replay.done} done, {replay.tokens} tokens"
        )
        self.show(self._switches, replay.started_wall_s, replay.elapsed_s)

    def show(self, switches: list[Json], began_s: float, elapsed_s: float) -> None:
        """Print what has happened by now and is not printed yet."""
        for at_s, line in sorted(self._phases + switch_lines(switches, began_s)):
            if at_s <= elapsed_s and line not in self._printed:
                self._printed.add(line)
                self._console.print(line, markup=False)

    def _ask(self) -> None:
        with _client(self._url) as http:
            while not self._over.wait(POLL_S):
                with suppress(httpx.HTTPError):  # a server that does not answer is noticed by the replay
                    self._switches = _switches(http)
