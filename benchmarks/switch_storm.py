"""Hundreds of random switches under load, every stream compared with the same request undisturbed,
and what they cost.

`python -m benchmarks.switch_storm --switches 300` starts a server of four engines on a tiny model.
It answers each of some requests once, alone, as the reference. Then it changes the layout again and
again, at random times and by random ways, while streams with and without a fixed degree go on (some
are left midway by their clients). It fails if a stream is not the reference token for token, if
blocks do not add up after a switch, or if a process has grown. With quantized weights (`--model
llama-w4a16 --dtype bfloat16`) degrees differ by their rounding: `harness/storm_bounds.py`. int4
weights in float32 have the exact product of `harness/int4_cpu.py`, and gated delta nets (`--model
qwen3.5`) the exact rule of `harness/gdn_cpu.py`. With `--adapters` two of three requests have an
adapter (LoRA). With `--lose` engines are lost after the switches, under the load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import httpx

from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import SHAPES
from flying_serving.config import MODES
from harness import both_ways, gdn_cpu, int4_cpu, lora, mxfp4_cpu, no_torchvision
from harness.forked import ENVIRONMENT, ROOT
from harness.live import FLAGS as LIVE_FLAGS
from harness.live import Server
from harness.storm_load import LONGEST_STEP, Job, Load, make_jobs
from harness.storm_losses import lose_engines
from harness.storm_report import Report, growth, print_report, sample_processes

LAYOUTS: tuple[list[list[int]], ...] = (
    [[0], [1], [2], [3]],
    [[0, 1], [2], [3]],
    [[0], [1], [2, 3]],
    [[0, 1], [2, 3]],
    [[0, 1, 2, 3]],
)
"""Every partition of four engines into aligned groups."""
FLAGS = (
    "--max-logprobs=512",  # to measure a near-tie over the whole vocabulary
    # 128 blocks for each engine: lanes compete for them, and all are soon in use
    "--kv-cache-memory-bytes=16777216",
    # oneDNN keeps 0.4 MiB per number of tokens and shape
    f"--max-num-batched-tokens={LONGEST_STEP}",
)
OF_SHAPE = {
    # the reference on the CPU, with AMX too; all engines of a group have a request's whole latents
    "deepseek-v3": ("--attention-backend=CPU_MLA", "--kv-cache-memory-bytes=25165824"),
    # an engine has 31 blocks of half a MiB: a request has three for its states, and one for its KV
    "qwen3.5": ("--language-model-only",),
}
FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""For latent attention. There vLLM computes a whole prompt in one step, so steps have hundreds of
lengths. oneDNN keeps up to 1024 primitives, some 0.4 MiB for each length and shape, and fills that
cache for many minutes: in stock vLLM too, and without switches.
"""
ASYNC = "--async-scheduling"
INT4 = ("w4a16", "gptq", "awq")
FLOAT32 = "float32"
MAX_PAUSE_S = 0.3
BACK_TO_BACK_SHARE = 0.3
WARM_SWITCHES = 50


async def storm(
    server: Server,
    switches: int,
    *,
    clients: int = 10,
    jobs: int = 32,
    seed: int = 0,
    modes: Sequence[str] = MODES,
    is_rounded: bool = False,
    loses: bool = False,
) -> Report:
    """Run a storm. Samples processes after WARM_SWITCHES switches (or a third of fewer) and at the
    end. `is_rounded`: see `Load`. `loses`: engines are lost then.
    """
    draw, report = random.Random(seed), Report()
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as admin:
        asked = await _with_adapters(admin, server, make_jobs(jobs, random.Random(seed)))
        load = Load(server, asked, clients, random.Random(seed + 1), report, is_rounded=is_rounded)
        await _layout(admin, LAYOUTS[0], "weave")
        await load.learn()
        await load.warm()
        report.outcomes.clear()  # streams are counted from the first switch on
        report.tokens = 0
        skip = len((await admin.get("/flying/switches")).json()["switches"])
        began_s = time.monotonic()
        load.start()
        for number in range(1, switches + 1):
            if draw.random() >= BACK_TO_BACK_SHARE:
                await asyncio.sleep(draw.uniform(0, MAX_PAUSE_S))
            await _switch(admin, draw.choice(LAYOUTS), draw.choice(modes), report)
            if number in (min(WARM_SWITCHES, switches // 3), switches):
                await load.quiet()
                await _check_idle(admin, report)
                await asyncio.sleep(0.5)
                report.samples[number] = sample_processes(server)
                load.resume()
        report.seconds = time.monotonic() - began_s
        report.switches = (await admin.get("/flying/switches")).json()["switches"][skip:]
        if loses:
            report.losses = [str(loss) for loss in await lose_engines(server, load, report)]
        await load.stop()
    report.failures += growth(*(report.samples[n] for n in sorted(report.samples)))
    return report


async def _with_adapters(
    admin: httpx.AsyncClient, server: Server, jobs: Sequence[Job]
) -> list[Job]:
    """Give jobs the server's adapters in turn, and none."""
    listed = [model["id"] for model in (await admin.get("/v1/models")).json()["data"]]
    names = ["" if name == server.model else name for name in listed]
    return [replace(job, adapter=name) for job, name in zip(jobs, cycle(names), strict=False)]


async def _layout(admin: httpx.AsyncClient, groups: list[list[int]], mode: str) -> None:
    answer = await admin.post("/flying/layout", json={"groups": groups, "mode": mode})
    if answer.status_code != 200 or answer.json()["to"] != groups:
        raise RuntimeError(f"switch to {groups} by {mode}: {answer.status_code} {answer.text}")


async def _switch(
    admin: httpx.AsyncClient, groups: list[list[int]], mode: str, report: Report
) -> None:
    await _layout(admin, groups, mode)
    answer = await admin.post("/flying/check", json={})
    if answer.status_code != 200:
        report.failures.append(f"blocks after the switch to {groups} by {mode}: {answer.text}")


async def _check_idle(admin: httpx.AsyncClient, report: Report) -> None:
    """Nothing is left of a request once all streams have ended."""
    deadline = time.monotonic() + 10
    while True:
        status = (await admin.get("/flying/status")).json()
        lanes = [lane for engine in status["engines"] for lane in engine["lanes"].values()]
        left = sum(status["requests"].values()) + sum(
            lane["running"] + lane["waiting"] for lane in lanes
        )
        if not left:
            break
        if time.monotonic() > deadline:
            report.failures.append(f"requests left when all streams had ended: {status}")
            break
        await asyncio.sleep(0.1)
    answer = await admin.post("/flying/check", json={})
    if answer.status_code != 200:
        report.failures.append(f"blocks while idle: {answer.text}")


def main() -> None:
    """Run from the command line; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--switches", type=int, default=300)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--async-scheduling", action="store_true", help="of the server's groups")
    parser.add_argument("--model", default="llama", choices=SHAPES, help="a tiny model's shape")
    parser.add_argument("--dtype", default=FLOAT32)
    parser.add_argument("--adapters", action="store_true", help="two in three requests have one")
    parser.add_argument("--lose", action="store_true", help="engines, after the switches")
    args = parser.parse_args()
    with _server(args) as server:
        report = asyncio.run(
            storm(
                server,
                args.switches,
                clients=args.clients,
                jobs=args.jobs,
                seed=args.seed,
                modes=args.modes,
                is_rounded=_is_rounded(args),
                loses=args.lose,
            )
        )
    print_report(report)
    sys.exit(1 if report.failures else 0)


def _server(args: argparse.Namespace) -> Server:
    flags = (*FLAGS, *OF_SHAPE.get(args.model, ()))
    if args.async_scheduling:
        flags += (ASYNC,)
    if args.adapters:
        folders = lora.adapters(args.model, ROOT / ".models")
        flags += (*lora.FLAGS, "--lora-modules", *(f"{name}={at}" for name, at in folders.items()))
    base = [flag for flag in LIVE_FLAGS if not flag.startswith("--dtype")]
    flags += (f"--dtype={args.dtype}",)
    has_latents = SHAPES[args.model].family == "deepseek_v3"
    return Server(
        args.model,
        4,
        *flags,
        base=base,
        preamble=_preamble(args),
        environment=ENVIRONMENT | (FEW_PRIMITIVES if has_latents else {}),
    )


def _preamble(args: argparse.Namespace) -> str:
    """Return code that lets groups step in both ways, and gives the server what its model needs on
    any CPU.
    """
    return f"{both_ways.PREAMBLE}\n{_of_model(args)}"


def _of_model(args: argparse.Namespace) -> str:
    if SHAPES[args.model].mxfp4:
        return mxfp4_cpu.PREAMBLE
    if _is_exact_int4(args):
        return int4_cpu.PREAMBLE
    if SHAPES[args.model].family != "qwen3_5":
        return ""
    exact = gdn_cpu.PREAMBLE if args.dtype == FLOAT32 else ""
    return f"{no_torchvision.PREAMBLE}\n{exact}"


def _is_exact_int4(args: argparse.Namespace) -> bool:
    return args.dtype == FLOAT32 and SHAPES[args.model].quantized in INT4


def _is_rounded(args: argparse.Namespace) -> bool:
    """Return whether degrees differ by more than rounding errors of float32."""
    quantizes_inputs = bool(SHAPES[args.model].quantized) and not _is_exact_int4(args)
    return args.dtype != FLOAT32 or quantizes_inputs


if __name__ == "__main__":
    with ended_by_signals():
        main()
