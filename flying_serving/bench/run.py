"""One measurement: look whether the server can serve the workload, replay it, keep the results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop

from flying_serving.bench.bodies import Bodies
from flying_serving.bench.client import Replay, Target
from flying_serving.errors import BenchError
from flying_serving.results.metrics import Slo, summarise
from flying_serving.results.results import Results, Run
from flying_serving.workload.model import Workload
from flying_serving.workload.prompts import Prompts

PROBE_S = 120.0
WATCH_S = 0.5


@dataclass(frozen=True)
class ReplaySettings:
    """How to replay."""

    vocabulary: range = range(1000, 30000)
    """Token ids for prompts."""
    prompt_seed: int | None = None
    """None: the workload's."""
    timeout_s: float = 600.0
    """How long a request may take."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields to add to each request."""


@dataclass(frozen=True)
class Served:
    """What a server says that it serves."""

    model: str
    max_tokens: int | None
    """Prompt and output of one request together."""


def probe(target: Target, settings: ReplaySettings, model: str | None = None) -> Served:
    """Ask the server for its model, and for one token of the smallest and largest token id.

    Raises:
        BenchError: if it does not answer, refuses, or does not serve the model.
    """
    with httpx.Client(headers=target.headers, timeout=PROBE_S, trust_env=False) as http:
        listed = _answer(http, "GET", target.url + "/v1/models")
        try:
            models = {entry["id"]: entry.get("max_model_len") for entry in listed["data"]}
        except (KeyError, TypeError):
            raise BenchError(f"{target.url}/v1/models: a list of models is expected, not {listed!r:.200}") from None
        if not models or (model is not None and model not in models):
            raise BenchError(f"{target.url} serves {', '.join(models) or 'no model'}, not {model or 'any'}")
        chosen = model if model is not None else next(iter(models))
        ends = [settings.vocabulary.start, settings.vocabulary.stop - 1]
        body = {"model": chosen, "prompt": ends, "max_tokens": 1, **settings.extra_body, "stream": False}
        try:
            _answer(http, "POST", target.url + "/v1/completions", body)
        except BenchError as error:
            hint = f"a test request with the token ids {ends[0]} and {ends[1]} failed; --token-ids sets their range"
            raise BenchError(f"{error}; {hint}") from None
    return Served(chosen, models[chosen])


def too_long(workload: Workload, served: Served) -> int:
    """How many requests need more tokens than the server allows for one."""
    if served.max_tokens is None:
        return 0
    return sum(request.prompt_tokens + request.output_tokens > served.max_tokens for request in workload.requests)


def measure(
    workload: Workload,
    target: Target,
    served: Served,
    settings: ReplaySettings,
    *,
    made: Callable[[int], None] | None = None,
    watch: Callable[[Replay], None] | None = None,
) -> Results:
    """Replay a workload. SIGINT ends it early: what has come is kept, the rest is unfinished.

    Args:
        workload: what to send.
        target: where to.
        served: what `probe` found there.
        settings: how.
        made: called with the number of request bodies made so far.
        watch: called every half second while it runs.
    """
    prompts = Prompts(workload, settings.vocabulary, settings.prompt_seed)
    with Bodies(workload, served.model, prompts, settings.extra_body, made) as bodies:
        replay = Replay(workload, bodies, target, settings.timeout_s)
        uvloop.run(_watched(replay, watch))
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


def save(results: Results, out: Path, slo: Slo | None) -> dict[str, Any]:
    """Write `results.parquet` and `summary.json` into a directory that exists; the summary."""
    summary = summarise(results, slo)
    results.save(out / "results.parquet")
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


async def _watched(replay: Replay, watch: Callable[[Replay], None] | None) -> None:
    """Run a replay with somebody looking on, and an ear for SIGINT."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, replay.stop)
    looking = asyncio.create_task(_look(replay, watch)) if watch is not None else None
    try:
        await replay.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if looking is not None:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


async def _look(replay: Replay, watch: Callable[[Replay], None]) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        watch(replay)


def _answer(http: httpx.Client, method: str, url: str, body: Any = None) -> Any:
    """The JSON of an answer that is 200."""
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
