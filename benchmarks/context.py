"""Short requests beside a long prompt a minute that no engine holds alone: what the long ones cost the short ones.

python -m benchmarks.context [--rounds 3] [--seconds 120] [--rate 2.5] [--regime link]

The short requests come faster than they can be served, so that the throughput is what the server can do: their output
tokens per second from the first arrival to the end of the last. Three runs in turn, on the same workload file:

- `auto`: policy auto, with the long requests;
- `short alone`: the same server without them;
- `unaware`: what an operator could do without transformation awareness: every engine joins the wide group when a long
  request comes and leaves it when that one is done, and short requests go to the least loaded group there is.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from statistics import median

import httpx
import numpy as np

from benchmarks.client import prompt
from benchmarks.policies import FLAGS, OUT, REGIMES
from benchmarks.systems import ROOT, System, Systems
from flying_serving.bench.client import Target
from flying_serving.bench.results import Results
from flying_serving.bench.run import Settings, measure, probe
from flying_serving.demo.tiny import make_model
from flying_serving.workload.files import save
from flying_serving.workload.mixes import with_long_prompts
from flying_serving.workload.model import Workload
from flying_serving.workload.synth import Poisson, synthesise

LONG_TOKENS, LONG_OUTPUTS = 6000, 64
ENGINE_TOKENS = 4096
# 12 layers, 12 KV heads, keys and values of 64 floats
CONTEXT_FLAGS = ["--max-model-len=8000", f"--kv-cache-memory-bytes={(ENGINE_TOKENS + 32) * 12 * 12 * 2 * 64 * 4}"]
APART, TOGETHER = [[0], [1]], [[0, 1]]


class Operator(threading.Thread):
    """Sends the long requests of a workload, each when the engines have merged for it, and splits them after it.

    Args:
        system: with policy manual.
        workload: the long requests are taken from it.
    """

    def __init__(self, system: System, workload: Workload) -> None:
        super().__init__(daemon=True)
        self._system = system
        self._arrivals_s = [r.arrival_s for r in workload.requests if r.prompt_tokens == LONG_TOKENS]
        self.served = 0

    def run(self) -> None:
        """One after the other."""
        began_s = time.monotonic()
        for number, arrival_s in enumerate(self._arrivals_s):
            time.sleep(max(0.0, began_s + arrival_s - time.monotonic()))
            self._system.layout(TOGETHER)
            body = {"model": self._system.model, "prompt": prompt(LONG_TOKENS, number), "ignore_eos": True}
            answer = httpx.post(
                f"{self._system.url}/v1/completions", json={**body, "max_tokens": LONG_OUTPUTS}, timeout=300
            )
            self.served += answer.status_code == 200
            self._system.layout(APART)


def short_tokens_per_s(results: Results) -> float:
    """Output tokens of the short requests per second until the last of them has ended."""
    short = results.floats("prompt_tokens") < LONG_TOKENS
    ends = [results.event_s[end - 1] for end, keep in zip(results.event_ends, short, strict=True) if keep and end]
    return float(results.floats("output_tokens")[short].sum() / max(ends))


def replay(system: System, workload: Workload, operated: Workload | None) -> dict[str, float]:
    """One run; `operated`: an operator serves the long requests of it meanwhile."""
    target, settings = Target(system.url), Settings(vocabulary=range(300, 500))
    found = probe(target, settings)
    operator = Operator(system, operated) if operated is not None else None
    if operator is not None:
        operator.start()
    results = measure(workload, target, found, settings)
    served = 0
    if operator is not None:
        operator.join(600)
        served = operator.served
    long = results.floats("prompt_tokens") == LONG_TOKENS
    return {
        "short tokens/s": short_tokens_per_s(results),
        "long served": float(np.sum(results.ok & long)) + served,
        "not completed": float(np.sum(~results.ok)),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=2.5, help="short requests per second")
    parser.add_argument("--regime", choices=REGIMES, default="link")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    rate: dict[str, float] = {"duration_s": args.seconds, "rate_rps": args.rate}
    short = synthesise(Poisson(requests=None, prompt_tokens=(64, 512), output_tokens=(16, 96), **rate), 1)
    mixed = with_long_prompts(short, LONG_TOKENS, LONG_OUTPUTS)
    save(mixed, OUT / "context.jsonl")
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with Systems() as systems:
        flags = [*FLAGS, *CONTEXT_FLAGS, *REGIMES[args.regime]]
        auto = systems.start(System("auto", model, [*flags, "--policy=auto"], ours=True))
        manual = systems.start(System("unaware", model, [*flags, "--policy=manual"], ours=True))
        for _ in range(args.rounds):
            for name, system, workload, operated in (
                ("auto", auto, mixed, None),
                ("short alone", auto, short, None),
                ("unaware", manual, short, mixed),
            ):
                system.resume()
                rows[name].append(replay(system, workload, operated))
                system.pause()
                print(name, {k: round(v, 1) for k, v in rows[name][-1].items()}, flush=True)
    rates = {name: [row["short tokens/s"] for row in found] for name, found in rows.items()}
    for name, values in rates.items():
        print(f"{name:12s} short tokens/s {median(values):.1f} [{min(values):.1f}..{max(values):.1f}]")
    print(f"auto / short alone {median(rates['auto']) / median(rates['short alone']):.2f}  bar >= 0.9")
    print(f"auto / unaware     {median(rates['auto']) / median(rates['unaware']):.2f}  bar >= 1.25")


if __name__ == "__main__":
    main()
