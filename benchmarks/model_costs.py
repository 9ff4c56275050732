"""Lanes of models of each kind beside stock vLLM of the same degree: tokens/s, memory of the
engines, and the time of a start. Tiny models, alternating, ratios with medians and spread.

python -m benchmarks.model_costs [--rounds 5] [KIND ...]

Two engines. Of stock vLLM there are two servers, DP 2 and TP 2. All servers have the same flags.
With experts there is no DP 2: on the CPU it ends with NotImplementedError at the first request.

Memory is the sum of the proportional set sizes of the engines when all rounds are over. Our two
engines have both lanes then, and are beside those of DP 2.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.client import prompt, run_streams
from benchmarks.live_report import spread
from benchmarks.startup import engine_memory_bytes
from benchmarks.steady_state import APART, OURS, TOGETHER
from benchmarks.systems import DP, ROOT, TP, System, Systems
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import SHAPES, make_model
from harness import lora

FLAGS = (
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=268435456",
    "--disable-uvicorn-access-log",
)
DRAFTS = (
    '--speculative-config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
)
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 48
TOKENS_BAR, MEMORY_BAR = 0.97, 1.05
_seeds = itertools.count(1)


@dataclass(frozen=True)
class Kind:
    """One kind of model: the name of its tiny shape, the type it computes in, and more flags."""

    shape: str
    dtype: str = "float32"
    flags: tuple[str, ...] = ()
    adapters: bool = False

    @property
    def servers(self) -> dict[str, list[str]]:
        """The flags that each server has for itself, by its name."""
        replicas = {} if SHAPES[self.shape].experts else {"DP": [DP]}
        return {**replicas, "TP": [TP], "ours": OURS}

    def folder(self) -> Path:
        """Return the folder of the model, which is written if it is not there yet."""
        return make_model(ROOT / ".models" / self.shape, self.shape)

    def all_flags(self) -> list[str]:
        """Return the flags of each server."""
        modules: list[str] = []
        if self.adapters:
            folders = lora.adapters(self.shape, ROOT / ".models")
            modules = ["--lora-modules", *(f"{name}={path}" for name, path in folders.items())]
        return [*FLAGS, f"--dtype={self.dtype}", *self.flags, *modules]

    def names(self, model: str) -> list[str]:
        """Return the model's name of each stream. With adapters each has another than the next."""
        among = (lora.ONE, lora.TWO) if self.adapters else (model,)
        return list(itertools.islice(itertools.cycle(among), STREAMS))


KINDS = {
    "plain": Kind("llama"),
    "w4a16": Kind("llama-w4a16", "bfloat16"),
    "int8": Kind("llama-int8"),
    # not in MXFP4: vLLM has no kernel for that on a CPU without AMX
    "gpt-oss": Kind("gpt-oss"),
    "latent": Kind("deepseek-v3", flags=("--attention-backend=CPU_MLA",)),
    "recurrent": Kind("falcon-h1", flags=("--no-enable-prefix-caching",)),
    "lora": Kind("llama", flags=lora.FLAGS, adapters=True),
    "drafts": Kind("llama", flags=(DRAFTS,)),
}


@dataclass
class Costs:
    """Of one kind: tokens/s of each round by system, memory and start of each server."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory_bytes: dict[str, int] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)

    def ratios(self, lane: str, stock: str) -> list[float]:
        """Return a lane's tokens/s over stock's, by rounds."""
        pairs = zip(self.tokens_per_s[lane], self.tokens_per_s[stock], strict=True)
        return [ours / theirs for ours, theirs in pairs]


def tokens_per_s(system: System, kind: Kind) -> float:
    """Output tokens per second of all streams."""
    prompts = [prompt(PROMPT_TOKENS, next(_seeds)) for _ in range(STREAMS)]
    return run_streams(system.url, kind.names(system.model), prompts, OUTPUT_TOKENS)[1]


def measure(kind: Kind, rounds: int) -> Costs:
    """Every system in turn, `rounds` times after a round that does not count."""
    costs, model, flags = Costs(), kind.folder(), kind.all_flags()
    with Systems() as systems:
        servers = {
            name: systems.start(System(name, model, [*flags, *more], ours=name == "ours"))
            for name, more in kind.servers.items()
        }
        costs.start_s = {name: server.ready_s for name, server in servers.items()}

        def one_round() -> Iterator[tuple[str, float]]:
            for name, server in servers.items():
                server.resume()
                if server.ours:
                    for row, layout in (("lane 1", APART), ("lane 2", TOGETHER)):
                        server.layout(layout)
                        yield row, tokens_per_s(server, kind)
                else:
                    yield name, tokens_per_s(server, kind)
                server.pause()

        for number in range(rounds + 1):
            for row, value in one_round():
                if number:
                    costs.tokens_per_s[row].append(value)
        costs.memory_bytes = {
            name: engine_memory_bytes(server) for name, server in servers.items() if name != "TP"
        }
    return costs


def report(name: str, costs: Costs) -> None:
    """Absolute figures, then the ratios that have a bar."""
    for row, values in costs.tokens_per_s.items():
        print(f"{name:10} {row:7} tokens/s {spread(values)}")
    for row, start_s in costs.start_s.items():
        size = costs.memory_bytes.get(row)
        memory = "" if size is None else f", {size >> 20} MiB"
        print(f"{name:10} {row:7} ready in {start_s:.1f} s{memory}")
    for lane, stock in (("lane 1", "DP"), ("lane 2", "TP")):
        if stock in costs.tokens_per_s:
            ratios = costs.ratios(lane, stock)
            print(f"{name:10} {lane} / {stock}: {spread(ratios, 3)}  bar >= {TOKENS_BAR}")
    if "DP" in costs.memory_bytes:
        share = costs.memory_bytes["ours"] / costs.memory_bytes["DP"]
        print(f"{name:10} memory, ours / DP: {share:.3f}  bar <= {MEMORY_BAR}")


def main() -> None:
    """Compare each kind, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if unknown := [name for name in options.kinds if name not in KINDS]:
        parser.error(f"KIND {unknown[0]!r}: must be one of {', '.join(KINDS)}")
    for name in options.kinds or KINDS:
        report(name, measure(KINDS[name], options.rounds))


if __name__ == "__main__":
    with ended_by_signals():
        main()
