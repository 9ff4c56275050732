"""Weights that a group of four lends to its KV cache, and has back: context, memory, time, and a
stream beside it.

python -m benchmarks.residency [--cycles 100]

Each cycle begins with four engines apart. A stream begins and goes with them into one group; a
request comes that the group holds, then one that it holds only with lent weights; when that has
ended the layout goes back, for which the weights have to come back. Memory is read after both
requests, so that each time the heap has what a long prompt leaves there. A request in lane 1 has to
have the same tokens and log probabilities to the last bit as before the first cycle. The context is
compared with stock vLLM at degree 4, whose ranks have as much memory for weights and KV together.
"""

import argparse
import asyncio
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open

from benchmarks.client import ANSWER_S, prompt, stream
from benchmarks.systems import ROOT, System, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

ENGINES, BLOCK_TOKENS, KV_BYTES = 4, 32, 16 * 2**20
FLAGS = [
    "--dtype=float32",
    "--enforce-eager",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=256",
    "--max-model-len=4096",
    f"--block-size={BLOCK_TOKENS}",
]
APART, TOGETHER = [[0], [1], [2], [3]], [[0, 1, 2, 3]]
PROMPT_TOKENS, OUTPUT_TOKENS, MORE_TOKENS = 64, 400, 96
"""Of the stream, and by how much the second request exceeds what a group holds that lends
nothing.
"""
FETCH = "flying:weight_fetch_seconds"


@dataclass(frozen=True)
class Memory:
    """Resident memory of all engines: what each has for itself, and what it shares (its KV)."""

    anonymous_bytes: int
    shared_bytes: int
    files: int

    @classmethod
    def of(cls, system: System) -> "Memory":
        """Of the server's children that are engines."""
        children = psutil.Process(system.process.pid).children(recursive=True)
        engines = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        kinds = [
            dict(re.findall(r"(RssAnon|RssShmem):\s+(\d+)", _status(each.pid))) for each in engines
        ]
        anonymous, shared = (
            sum(1024 * int(kind[name]) for kind in kinds) for name in ("RssAnon", "RssShmem")
        )
        return cls(anonymous, shared, sum(each.num_fds() for each in engines))


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text(encoding="ascii")


@dataclass(frozen=True)
class Cycle:
    """What one cycle has shown: memory in the group with all weights, and with lent ones;
    seconds.
    """

    whole: Memory
    lent: Memory
    order_s: float
    worst_gap_s: float
    usual_gap_s: float
    same: bool


def weights_bytes(model: Path, degree: int) -> int:
    """Weights of one rank: matrices are cut, vectors are not."""
    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                shape = weights.get_slice(name).get_shape()
                elements = 1
                for size in shape:
                    elements *= size
                total += 4 * elements // (degree if len(shape) > 1 else 1)
    return total


def static_tokens(model: Path) -> int:
    """KV tokens of stock vLLM at degree 4, with as much memory for each rank as one of our engines
    has.
    """
    kv_bytes = KV_BYTES + weights_bytes(model, 1) - weights_bytes(model, ENGINES)
    flags = [*FLAGS, f"--tensor-parallel-size={ENGINES}", f"--kv-cache-memory-bytes={kv_bytes}"]
    system = System("stock TP 4", model, flags, ours=False)
    try:
        found = re.search(r"KV cache size: ([\d,]+) tokens", system.log())
        assert found, "stock vLLM has not said what its KV cache holds"
        return int(found[1].replace(",", ""))
    finally:
        system.stop()


def probe(system: System) -> Any:
    """Tokens and log probabilities of a request in lane 1, alone."""
    body = {
        "model": system.model,
        "prompt": prompt(48, 1),
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
        "cache_salt": str(time.monotonic()),
    }
    answer = httpx.post(
        f"{system.url}/v1/completions", json=body, timeout=ANSWER_S
    ).raise_for_status()
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]


async def run_cycle(system: System, number: int, long_tokens: int, first: Any) -> Cycle:
    """Lend once and have everything back."""
    async with httpx.AsyncClient(
        base_url=system.url, limits=httpx.Limits(), timeout=ANSWER_S
    ) as client:

        async def order(groups: list[list[int]]) -> None:
            answer = await client.post("/flying/layout", json={"groups": groups, "mode": "migrate"})
            answer.raise_for_status()

        began, seed = asyncio.Event(), 10 * number
        sent = stream(client, system.model, prompt(PROMPT_TOKENS, seed), OUTPUT_TOKENS, began=began)
        streaming = asyncio.create_task(sent)
        await asyncio.wait_for(began.wait(), ANSWER_S)
        await order(TOGETHER)
        await stream(
            client,
            system.model,
            prompt(long_tokens - MORE_TOKENS - OUTPUT_TOKENS - 100, seed + 1),
            4,
        )
        whole = Memory.of(system)
        await stream(client, system.model, prompt(long_tokens - 4, seed + 2), 4)
        lent = Memory.of(system)
        ordered_s = time.monotonic()
        await order(APART)
        order_s = time.monotonic() - ordered_s
        through = await streaming
    gaps = [b - a for a, b in pairwise(through.token_s)]
    same = await asyncio.to_thread(probe, system) == first
    return Cycle(whole, lent, order_s, max(gaps), median(gaps), same)


def fetch_seconds(system: System) -> tuple[float, float]:
    """How often weights came back, and seconds in all."""
    text = httpx.get(f"{system.url}/metrics", timeout=60).raise_for_status().text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    values = {sample.name: sample.value for sample in samples if sample.name.startswith(FETCH)}
    return values[f"{FETCH}_count"], values[f"{FETCH}_sum"]


def report(cycles: list[Cycle], lent_bytes: int, fetched: tuple[float, float]) -> None:
    """Print medians and the largest; memory is that of all engines."""
    mib = 2**20
    falls = [
        (each.whole.anonymous_bytes - each.lent.anonymous_bytes) / lent_bytes for each in cycles[1:]
    ]
    rises = [
        (b.whole.anonymous_bytes - a.lent.anonymous_bytes) / lent_bytes for a, b in pairwise(cycles)
    ]
    for name, ratios in (("falls", falls), ("rises", rises)):
        shown = f"{median(ratios):.3f} [{min(ratios):.3f}..{max(ratios):.3f}]"
        print(
            f"memory of weights {name} by {shown} of the {lent_bytes / mib:.1f} MiB that KV "
            "gains (bar 0.98 to 1.02)"
        )
    first, last = cycles[min(5, len(cycles) - 1)].whole, cycles[-1].whole
    own, shared = (
        last.anonymous_bytes - first.anonymous_bytes,
        last.shared_bytes - first.shared_bytes,
    )
    files = last.files - first.files
    print(
        f"from the sixth cycle to the last: {own / mib:+.1f} MiB, KV {shared / mib:+.1f} MiB, "
        f"{files:+} open files"
    )
    print(f"bitwise the same in lane 1: {sum(each.same for each in cycles)} of {len(cycles)}")
    print(f"weights came back {fetched[0]:.0f} times, in {fetched[1] / fetched[0]:.3f} s each")
    orders, gaps = [each.order_s for each in cycles], [each.worst_gap_s for each in cycles]
    print(f"from the order until it is made: {median(orders):.2f} s, at most {max(orders):.2f}")
    usual = median(each.usual_gap_s for each in cycles)
    print(
        f"worst gap of the stream: median {median(gaps):.2f} s, largest {max(gaps):.2f}; usual "
        f"{1e3 * usual:.0f} ms"
    )


def main() -> None:
    """Run all cycles, then compare the context with static TP."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=100)
    options = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    flags = [*FLAGS, f"--data-parallel-size={ENGINES}", f"--kv-cache-memory-bytes={KV_BYTES}"]
    system = System("ours", model, [*flags, "--policy=manual", "--lend-weights"], ours=True)
    try:
        status = system.ask("status")
        whole, lent = status["capacity_tokens"][str(ENGINES)], status["lent_capacity_tokens"]
        print(
            f"{commit()}: a group of {ENGINES} holds {whole} tokens, with lent weights {lent}",
            flush=True,
        )
        gained = (lent - whole) * KV_BYTES // (whole + ENGINES * BLOCK_TOKENS) * ENGINES
        first, cycles = probe(system), list[Cycle]()
        for number in range(options.cycles):
            cycles.append(asyncio.run(run_cycle(system, number, whole + MORE_TOKENS, first)))
        report(cycles, gained, fetch_seconds(system))
        httpx.post(f"{system.url}/flying/check", json={}, timeout=60).raise_for_status()
    finally:
        system.stop()
    static = static_tokens(model)
    print(f"context: {lent} of static TP's {static} tokens: {lent / static:.4f} (bar 0.97)")


if __name__ == "__main__":
    with ended_by_signals():
        main()
