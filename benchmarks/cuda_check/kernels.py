"""Lines about kernels and memory, by benchmarks that each run in a process of their own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cuda_check.asking import require
from benchmarks.cuda_check.site import Site

FEW_TOKENS, FEW_BAR, PRODUCTS_BAR = 16, 1.12, 1.07
"""Most of all four products of a layer, as a multiple of stock's, for at most so many tokens and
for more.

For few tokens they take some 20 us at degree 8, and the copy of q, k, v is one more launch of 2 us.
For more tokens the copy is a few percent of what is read and written, and products that are stock's
own were timed at 0.94 to 1.07 of stock's.
"""
PRODUCTS_S, PULLS_S, ARENA_S = 100.0, 60.0, 60.0
PRODUCTS = "benchmarks.fused_products --device cuda --layers 4 --degrees 2 4 8"
PULLS = "benchmarks.kv_pulls --device cuda --tokens 1024 8192"
ARENA = "benchmarks.device_arena"


def products(site: Site) -> str:
    """Time the products of fused layers over lanes' views beside stock's, 8B and 70B shapes."""
    return evaluate_products(_rows(PRODUCTS, PRODUCTS_S))


def evaluate_products(rows: Sequence[dict[str, Any]]) -> str:
    """Return the worst ratio of each shape, over degrees and numbers of tokens.

    Raises:
        AssertionError: if one is above the bar.
    """
    figures = []
    for model in dict.fromkeys(row["model"] for row in rows):
        worst = max((row for row in rows if row["model"] == model), key=lambda row: row["ratio"])
        where = f"degree {worst['degree']}, {worst['tokens']} tokens"
        figures.append(f"{model}: {worst['ratio']:.2f} of stock at most ({where})")
    above = sum(row["ratio"] > _bar(row) for row in rows)
    figure = f"{'; '.join(figures)}; {above} of {len(rows)} cases above the bar"
    require(bool(rows) and above == 0, figure)
    return figure


def _bar(row: dict[str, Any]) -> float:
    return FEW_BAR if row["tokens"] <= FEW_TOKENS else PRODUCTS_BAR


def pulls(site: Site) -> str:
    """Time pulls of KV by the kernel beside those tile by tile."""
    return evaluate_pulls(_rows(PULLS, PULLS_S))


def evaluate_pulls(rows: Sequence[dict[str, Any]]) -> str:
    """Return the least ratio of the kernel's bandwidth to the loop's beside its bar, and the
    bandwidths.

    Raises:
        AssertionError: if one is below the bar.
    """
    kernel = [row for row in rows if row["way"] == "kernel"]
    require(bool(kernel), "the kernel was not run")
    least = min(kernel, key=lambda row: row["ratio"] / row["bar"])
    rates = [row["gb_s"] for row in kernel]
    calls_us = [1e6 * row["call_s"] for row in kernel]
    figure = (
        f"{least['ratio']:.1f} times the loop's at least, bar {least['bar']:g} ({least['lanes']}, "
        f"{least['tokens']} tokens); {min(rates):.0f} to {max(rates):.0f} GB/s; a call takes "
        f"{min(calls_us):.0f} to {max(calls_us):.0f} us of the host"
    )
    require(all(row["ratio"] >= row["bar"] for row in kernel), figure)
    return figure


def arena(site: Site) -> str:
    """Let pages of an arena come and go beside others, and another process map them."""
    (row,) = _rows(ARENA, ARENA_S)
    return (
        f"{row['back_us']:.0f} us to back a page, {row['release_us']:.0f} us to release one; "
        f"another process started and read them within {row['peer_ms']:.0f} ms"
    )


def _rows(module: str, within_s: float) -> list[dict[str, Any]]:
    """Run a benchmark, and return the rows that it writes.

    Raises:
        RuntimeError: with the end of its output, if it fails.
        subprocess.TimeoutExpired: if it takes longer than `within_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        line = [sys.executable, "-m", *module.split(), f"--json={path}"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=within_s, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{module}: {(done.stderr or done.stdout)[-250:]}")
        rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows
