"""Short requests beside a long prompt a minute that no engine holds alone: what the long ones cost
the short ones.

python -m benchmarks.context [--rounds 3] [--seconds 120] [--rate 5] [--regime link]
    [--long-tokens 6000] [--long-outputs 64] [--kv-tokens 8192] [--engines 2]
    [--runs auto "short alone" unaware "unaware, live"]

By default the short requests come faster than they can be served, so that the throughput is what
the server can do: their output tokens per second from the first arrival to the end of the last.
Four runs in turn, on the same workload file:

- `auto`: policy auto, with the long requests;
- `short alone`: the same server without them;
- `unaware`: least-loaded routing that does not know of transformations (Gyges' baseline): every
  engine joins the wide group when a long request comes, short ones go to the least loaded group
  there is, and a group splits when it is empty, as instances do that cannot take running requests
  along;
- `unaware, live`: the same with this project's switches: it splits as soon as the long request is
  done.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import httpx
import numpy as np

from benchmarks.client import prompt
from benchmarks.policies import FLAGS, LENGTHS, LINKS, OUT, REGIMES, flag
from benchmarks.systems import ROOT, System, Systems
from flying_lab.bench.client import Target
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import measure, probe
from flying_lab.results.results import Results
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import SHAPES, make_model
from flying_lab.workload.files import save
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.shape import with_long_prompts
from flying_lab.workload.synth import Poisson, synthesise

MOST_SHORT_TOKENS = LENGTHS["prompt_tokens"][1]
MODEL = "llama-75m"
KV_TOKENS, BLOCK_TOKENS, KEPT_TOKENS = 8192, flag("block-size"), 192
"""What all KV caches hold, beside a block in each: a long prompt fits into all of them, but into
none alone. A request (`--max-model-len`) may have KEPT_TOKENS less.
"""
_SHAPE = SHAPES[MODEL]
_TOKEN_BYTES = _SHAPE.layers * _SHAPE.kv_heads * 2 * _SHAPE.head_dim * 4
LIVE = "unaware, live"
RUNS = ("auto", "short alone", "unaware", LIVE)
POLL_S, LONGEST_S, FINISH_S = 0.2, 3600.0, 600.0


def context_flags(engines: int, kv_tokens: int) -> list[str]:
    """Each engine has its share of the KV tokens."""
    sizes = {
        "data-parallel-size": engines,
        "max-model-len": kv_tokens - KEPT_TOKENS,
        "kv-cache-memory-bytes": (kv_tokens // engines + BLOCK_TOKENS) * _TOKEN_BYTES,
    }
    return [f"--{name}={value}" for name, value in sizes.items()]


class Operator(threading.Thread):
    """Sends the long requests of a workload, each when the engines have merged for it, and splits
    them after it.

    Args:
        system: with policy manual.
        longs: the long requests.
        engines: how many the system has.
        live: split them while other requests run.
    """

    def __init__(
        self, system: System, longs: Sequence[Request], engines: int, *, live: bool
    ) -> None:
        super().__init__(daemon=True)
        self._system = system
        self._apart, self._together = (
            [[engine] for engine in range(engines)],
            [list(range(engines))],
        )
        self._live = live
        self.over = threading.Event()
        """Set it when no short request runs any more."""
        self._longs = longs
        self.served = 0
        self.latencies_s: list[float] = []
        """From when each request that was served was due to its end."""

    def run(self) -> None:
        """One after the other."""
        began_s = time.monotonic()
        for number, long in enumerate(self._longs):
            self._wait_empty(began_s + long.arrival_s)
            self._system.layout(self._together)
            body = {
                "model": self._system.model,
                "prompt": prompt(long.prompt_tokens, number),
                "ignore_eos": True,
            }
            body["max_tokens"] = long.output_tokens
            answer = httpx.post(f"{self._system.url}/v1/completions", json=body, timeout=300)
            if answer.status_code == 200:
                self.served += 1
                self.latencies_s.append(time.monotonic() - began_s - long.arrival_s)
            if self._live:
                self._system.layout(self._apart)
        self._wait_empty(began_s + LONGEST_S)
        self._system.layout(self._apart)

    def finish(self) -> None:
        """Let it end when no short request runs any more. Raises TimeoutError after FINISH_S."""
        self.over.set()
        self.join(FINISH_S)
        if self.is_alive():
            raise TimeoutError(f"long prompts were not served within {FINISH_S:.0f} s")

    def _wait_empty(self, until_s: float) -> None:
        """Until then; apart as soon as nothing runs."""
        while time.monotonic() < until_s and not self.over.is_set():
            requests = self._system.ask("status")["requests"]
            if not requests["running"] + requests["waiting"]:
                self._system.layout(self._apart)
                self.over.wait(until_s - time.monotonic())
            self.over.wait(POLL_S)


def short_tokens_per_s(results: Results) -> float:
    """Output tokens of the short requests per second until the last of them has ended."""
    short = results.floats("prompt_tokens") <= MOST_SHORT_TOKENS
    ends = [
        results.event_s[end - 1]
        for end, keep in zip(results.event_ends, short, strict=True)
        if keep and end
    ]
    return float(results.floats("output_tokens")[short].sum() / max(ends))


def replay(system: System, workload: Workload, operator: Operator | None) -> dict[str, float]:
    """One run; an operator serves long requests meanwhile."""
    target, settings = Target(system.url), BenchOptions(token_ids=(300, 499))
    found = probe(target, settings)
    if operator is not None:
        operator.start()
    results = measure(workload, target, found, settings)
    served = 0
    if operator is not None:
        operator.finish()
        served = operator.served
    long = results.floats("prompt_tokens") > MOST_SHORT_TOKENS
    for error in filter(None, results.texts("error")):
        print(f"not completed: {error}", flush=True)
    return {
        "short tokens/s": short_tokens_per_s(results),
        "long served": float(np.sum(results.ok & long)) + served,
        "not completed": float(np.sum(~results.ok)),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=5.0, help="short requests per second")
    parser.add_argument("--long-tokens", type=int, default=6000, help="of each long prompt")
    parser.add_argument("--long-outputs", type=int, default=64, help="tokens that it gets")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="which of the four")
    parser.add_argument(
        "--kv-tokens", type=int, default=KV_TOKENS, help="that all engines hold together"
    )
    parser.add_argument("--regime", choices=REGIMES, default="link")
    parser.add_argument("--engines", type=int, choices=(2, 4), default=2)
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    rate: dict[str, float] = {"duration_s": args.seconds, "rate_rps": args.rate}
    short = synthesise(Poisson(requests=None, **LENGTHS, **rate), 1)
    mixed = with_long_prompts(short, args.long_tokens, args.long_outputs)
    longs = [request for request in mixed.requests if request.prompt_tokens > MOST_SHORT_TOKENS]
    save(mixed, OUT / "context.jsonl")
    model = make_model(ROOT / ".models" / MODEL, MODEL)
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with Systems() as systems:
        flags = [*FLAGS, *context_flags(args.engines, args.kv_tokens), *REGIMES[args.regime]]
        link = LINKS.get(args.regime)
        auto = systems.start(System("auto", model, [*flags, "--policy=auto"], ours=True, link=link))
        auto.resume()
        held = auto.ask("status")["capacity_tokens"]["1"]
        auto.pause()
        if held >= args.long_tokens:
            raise SystemExit(
                f"an engine holds {held} tokens: a long prompt of {args.long_tokens} needs no group"
            )
        manual = systems.start(
            System("unaware", model, [*flags, "--policy=manual"], ours=True, link=link)
        )
        for _ in range(args.rounds):
            for name in args.runs:
                system = manual if name.startswith("unaware") else auto
                workload = mixed if name == "auto" else short
                operator = (
                    Operator(system, longs, args.engines, live=name == LIVE)
                    if system is manual
                    else None
                )
                system.resume()
                rows[name].append(replay(system, workload, operator))
                system.pause()
                print(name, {k: round(v, 1) for k, v in rows[name][-1].items()}, flush=True)
    rates = {name: [row["short tokens/s"] for row in found] for name, found in rows.items()}
    for name, values in rates.items():
        print(
            f"{name:13s} short tokens/s {median(values):.1f} [{min(values):.1f}..{max(values):.1f}]"
        )
    for name, bar in (("short alone", 0.9), ("unaware", 1.25), (LIVE, None)):
        if "auto" in rates and name in rates:
            ratio = f"{median(rates['auto']) / median(rates[name]):.2f}"
            print(f"auto / {name:13s} {ratio}" + (f"  bar >= {bar}" if bar else ""))


if __name__ == "__main__":
    with ended_by_signals():
        main()
