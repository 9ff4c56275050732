"""What each part of `auto` gives on the load of docs/lab/results/phases.md, stock vLLM with other
chunks, and the host's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from experiments import phases_load, servers
from experiments.common import MODELS, Kept, Numbers, Setting, run, template
from experiments.phases_load import OPTIONS
from experiments.rows import Row, markdown, number, page, paragraph, write
from experiments.server_pages import NOTICES
from experiments.servers import GRAPHS
from flying_lab.sim.node import System
from flying_serving.policy.policies import POLICIES

CHUNKS_TOKENS = (8192, 4096, 2048, 1024)
HOST_SHARES = (0.0, 0.5)
FIGURES = ("mean_e2el_ms", "mean_ttft_ms")
QUEUE, LAYOUTS, TOKEN, ALL = "central queue", "layouts", "token parallel steps", "all"
CHUNKED = "auto"
PARTS = (QUEUE, LAYOUTS, TOKEN, ALL)


def measure(setting: Setting) -> Numbers:
    """By model and system: mean E2E and TTFT."""
    return {
        model: {name: _figures(one, model, setting) for name, one in compared(model, setting)}
        for model in MODELS
    }


def compared(model: str, setting: Setting) -> Iterator[tuple[str, System]]:
    """Yield the parts, `auto` with less work of the host, and `auto` and stock vLLM with each
    chunk.
    """
    devices, *wider = degrees = servers.degrees(model, setting)
    auto, tensor = POLICIES["auto"], replace(OPTIONS, token_parallel=False)
    for degree in degrees:
        fixed = servers.static(degree, devices)
        yield f"{QUEUE}, {fixed.name}", servers.ours(GRAPHS, fixed, model, setting, tensor)
    yield LAYOUTS, servers.ours(GRAPHS, auto, model, setting, tensor)
    widest = servers.static(wider[-1], devices)
    yield TOKEN, servers.ours(GRAPHS, widest, model, setting, OPTIONS)
    yield ALL, servers.ours(GRAPHS, auto, model, setting, OPTIONS)
    for share in HOST_SHARES:
        yield (
            f"host {share:g}, auto",
            servers.ours(GRAPHS, auto, model, setting, OPTIONS, host_share=share),
        )
    for chunk_tokens in CHUNKS_TOKENS:
        options = replace(OPTIONS, max_num_batched_tokens=chunk_tokens)
        if chunk_tokens != OPTIONS.max_num_batched_tokens:
            yield f"{CHUNKED}, {chunk_tokens}", servers.ours(GRAPHS, auto, model, setting, options)
        for name in ("stock-dp", *(f"stock-tp{degree}" for degree in wider)):
            yield f"{name}, {chunk_tokens}", servers.stock(name, model, setting, options)


def _figures(one: System, model: str, setting: Setting) -> Numbers:
    summary = run(one, model, phases_load.load(model, setting.seed)).summary
    return {figure: float(f"{summary[figure]:.5g}") for figure in FIGURES}


def e2e_s(found: Kept, model: str, name: str) -> float:
    """Return the mean E2E of a system."""
    return float(found.seeds[0][model][name]["mean_e2el_ms"]) / 1e3


def of_part(found: Kept, model: str, part: str) -> str:
    """Return the system that has this part alone: of the fixed layouts the best."""
    names = [name for name in found.seeds[0][model] if name.split(", ")[0] == part]
    return min(names, key=lambda name: e2e_s(found, model, name))


def ahead(found: Kept, model: str) -> list[str]:
    """Return the stock servers that have less mean TTFT and less mean E2E than `auto`."""
    there = found.seeds[0][model]
    return [
        name
        for name in there
        if name.startswith("stock-")
        and all(there[name][figure] < there[ALL][figure] for figure in FIGURES)
    ]


def least_by_chunk(found: Kept, model: str) -> str:
    """Return the chunk with which `auto` has the least mean E2E, beside vLLM's default."""
    there = found.seeds[0][model]
    default = there[ALL]
    others = {chunk: there[f"{CHUNKED}, {chunk}"] for chunk in CHUNKS_TOKENS[1:]}
    least = min(others, key=lambda chunk: others[chunk][FIGURES[0]])
    if default[FIGURES[0]] <= others[least][FIGURES[0]]:
        return f"{CHUNKS_TOKENS[0]:,}"
    e2e, ttft = (number(others[least][figure] / default[figure]) for figure in FIGURES)
    return f"{least:,} ({e2e} of the E2E with {CHUNKS_TOKENS[0]:,}, and {ttft} of its TTFT)"


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    first = "; ".join(f"{m}: {', '.join(ahead(found, m)) or 'none'}" for m in MODELS)
    chunks = "; ".join(f"{m}: {least_by_chunk(found, m)}" for m in MODELS)
    lines = paragraph(template("parts", ahead=first, chunks=chunks))
    rows = [
        [model, *(f"{number(e2e_s(found, model, of_part(found, model, p)))}" for p in PARTS)]
        for model in MODELS
    ]
    lines += ["## Parts alone, mean E2E (s)", "", *markdown(["model", *PARTS], rows)]
    for model in MODELS:
        rows = [
            [name, number(row["mean_e2el_ms"] / 1e3), number(row["mean_ttft_ms"])]
            for name, row in found.seeds[0][model].items()
        ]
        heads = ["system", "mean E2E (s)", "mean TTFT (ms)"]
        lines += [f"## {model}", "", *markdown(heads, rows)]
    write(folder, "parts", page("Parts of `auto`", {"parts": found}, lines, NOTICES))
    return []
