"""One replay against one server: ask it for its model, send the workload, keep results and the log
of switches.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop
from rich.console import Console

from flying_lab.bench import switchlog, view
from flying_lab.bench.bodies import Bodies
from flying_lab.bench.client import INTERRUPTED, Replay, Target
from flying_lab.bench.options import BenchOptions
from flying_lab.errors import BenchError
from flying_lab.results.metrics import summarise
from flying_lab.results.record import NOT_SENT
from flying_lab.results.results import Results, Run
from flying_lab.workload.model import Workload
from flying_lab.workload.prompts import Prompts

RESULTS = "results.parquet"
SWITCHES = "switches.json"
SUMMARY = "summary.json"
PROBE_S = 120.0


@dataclass(frozen=True)
class Replayed:
    """The results of a replay, with their summary."""

    results: Results
    summary: dict[str, Any]

    @property
    def stopped(self) -> bool:
        """True if the replay was ended before all requests had ended."""
        return any(error in (INTERRUPTED, NOT_SENT) for error in self.results.texts("error"))


Beside = Callable[[Replay], Coroutine[Any, Any, None]]
"""Runs in the event loop of a replay, beside it, and is cancelled at its end."""


def replay_one(
    options: BenchOptions,
    workload: Workload,
    url: str,
    out: Path,
    console: Console,
    *beside: Beside,
) -> Replayed:
    """Replay the workload; write results, summary and the log of switches, if the server has one,
    into `out`.

    The summary tells whether the client fell behind (`view.lag_warning`).

    Raises:
        BenchError: if the server cannot be measured.
    """
    target = Target(url, options.api_key)
    served = probe(target, options)
    if longer := too_long(workload, served):
        limit = f"the {served.max_tokens} tokens of {served.model}"
        _warn(f"{longer} of {len(workload.requests)} requests need more than {limit}")
    with view.Watch(console, len(workload.requests)) as watch:
        results = measure(workload, target, served, options, watch.follow, *beside, made=watch.made)
    summary = summarise(results, options.slo)
    try:
        log = switchlog.fetch(target)
    except BenchError as error:
        _warn(str(error))
        log = None
    save(out, results, summary, log)
    return Replayed(results, summary)


def save(out: Path, results: Results, summary: dict[str, Any], log: dict[str, Any] | None) -> None:
    """Write results, summary and the log of switches, if there is one, into a directory of their
    own.
    """
    out.mkdir(exist_ok=True)
    results.save(out / RESULTS)
    for name, value in ((SUMMARY, summary), (SWITCHES, log)):
        if value is not None:
            (out / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _warn(message: str) -> None:
    sys.stderr.write(f"flying-serving: {message}\n")


@dataclass(frozen=True)
class Served:
    """The model that a server serves."""

    model: str
    max_tokens: int | None
    """The limit of prompt and output of one request together."""


def probe(target: Target, options: BenchOptions) -> Served:
    """Ask the server for its model, and for one token of the smallest and largest token id.

    Raises:
        BenchError: if it does not answer, refuses, or does not serve the model.
    """
    with httpx.Client(headers=target.headers, timeout=PROBE_S, trust_env=False) as http:
        listed = _answer(http, "GET", target.url + "/v1/models")
        try:
            models = {entry["id"]: entry.get("max_model_len") for entry in listed["data"]}
        except (KeyError, TypeError):
            raise BenchError(
                f"{target.url}/v1/models: a list of models is expected, not {listed!r:.200}"
            ) from None
        if not models or (options.model is not None and options.model not in models):
            raise BenchError(
                f"{target.url} serves {', '.join(models) or 'no model'}, not "
                f"{options.model or 'any'}"
            )
        chosen = options.model if options.model is not None else next(iter(models))
        ends = options.token_ids
        body = {
            "model": chosen,
            "prompt": ends,
            "max_tokens": 1,
            **options.extra_body,
            "stream": False,
        }
        try:
            _answer(http, "POST", target.url + "/v1/completions", body)
        except BenchError as error:
            hint = (
                f"a test request with the token ids {ends[0]} and {ends[1]} failed; "
                "--token-ids sets their range"
            )
            raise BenchError(f"{error}; {hint}") from None
    return Served(chosen, models[chosen])


def too_long(workload: Workload, served: Served) -> int:
    """Return how many requests need more tokens than the server allows for one."""
    if served.max_tokens is None:
        return 0
    return sum(
        request.prompt_tokens + request.output_tokens > served.max_tokens
        for request in workload.requests
    )


def measure(
    workload: Workload,
    target: Target,
    served: Served,
    options: BenchOptions,
    *beside: Beside,
    made: Callable[[int], None] | None = None,
) -> Results:
    """Replay a workload on a server that was probed. `made` is called with the number of request
    bodies made so far.

    SIGINT ends it early: completed requests are kept, the others are unfinished.
    """
    prompts = Prompts(workload, options.vocabulary, options.prompt_seed)
    with Bodies(workload, served.model, prompts, options.extra_body, made) as bodies:
        replay = Replay(workload, bodies, target, options.timeout_s)
        uvloop.run(_run(replay, beside))
        drift_s = replay.wall_drift_s()
    ends = [record.end_s for record in replay.records if record.end_s is not None]
    run = Run(
        workload=workload.name,
        origin=workload.origin,
        seed=workload.seed,
        url=target.url,
        model=served.model,
        started_wall_s=replay.started_wall_s,
        duration_s=max(ends, default=0.0),
        **msgspec.structs.asdict(replay.lag.result()),
        wall_drift_s=drift_s,
    )
    return Results.of(run, replay.records)


async def _run(replay: Replay, beside: Sequence[Beside]) -> None:
    """Run a replay, and other coroutines beside it; SIGINT stops it."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, replay.stop)
    others = [asyncio.create_task(other(replay)) for other in beside]
    try:
        await replay.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        for other in others:
            other.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await other


def _answer(http: httpx.Client, method: str, url: str, body: Any = None) -> Any:
    """Return the JSON of an answer with status 200."""
    try:
        answer = http.request(method, url, json=body)
        if answer.status_code == 200:
            return answer.json()
    except httpx.HTTPError as error:
        raise BenchError(f"{url}: no server answers ({error})") from None
    except httpx.InvalidURL as error:
        raise BenchError(f"{url}: {error}") from None
    except ValueError:
        raise BenchError(f"{url}: the answer is not JSON") from None
    raise BenchError(f"{url}: {' '.join(answer.text.split())[:500]} ({answer.status_code})")
