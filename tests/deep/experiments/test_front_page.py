"""README's table is of the numbers that are kept, and says where `auto` loses."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from experiments import front_page, live
from experiments.common import MODELS, Kept, Numbers, kept
from experiments.front_page import SERVER
from experiments.goodput import RATES_RPS
from experiments.servers import PRODUCT, STOCK

STOCK_MS = {
    "stock-dp": 4_000.0,
    "stock-tp4": 2_000.0,
    "stock-tp8": 2_500.0,
    "shift-parallel": 1_000.0,
}
"""Mean E2E in low phases; that of bursts is twice as long."""
LIVE: Mapping[str, Any] = {
    "rows": [
        {"system": name, "phase": "all", "figure": "mean_e2el_ms", "values": values}
        for name, values in {
            "static-dp": [100.0, 80.0],
            "static-tp": [50.0, 100.0],
            "auto": [55.0, 120.0],
        }.items()
    ]
}
EMULATED: Mapping[str, Any] = {
    "rows": [
        {"system": name, "phase": "all", "figure": figure, "live": values}
        for figure, systems in {
            "mean_e2el_ms": {"stock-dp": [100.0, 200.0], "auto": [90.0, 100.0]},
            "mean_ttft_ms": {"stock-dp": [10.0, 10.0], "auto": [15.0, 10.0]},
        }.items()
        for name, values in systems.items()
    ]
}
TRACE: Mapping[str, Any] = {
    "rows": [
        row if row["system"] != "auto" else row | {"values": [110.0, 240.0]} for row in LIVE["rows"]
    ]
}


def _run(low_ms: float, layouts: tuple[str, ...] = ("1 x TP8",)) -> Numbers:
    """Return a run with nine requests in bursts for each one in a low phase."""
    phases = {
        phase: {"requests": requests, "mean_e2el_ms": low_ms * longer}
        for phase, requests, longer in (("low", 1, 1.0), ("burst", 9, 2.0), ("after", 0, 1.0))
    }
    shares = {phase: dict.fromkeys(layouts, 1.0 / len(layouts)) for phase in phases}
    switches = [{"phase": "before"}, *[{"phase": "low"}] * (len(layouts) - 1)]
    return {"phases": phases, "layouts": shares, "switches": switches}


def _phases(product_ms: float = 3_000.0, layouts: tuple[str, ...] = ("1 x TP8",)) -> Kept:
    """Return a run of one seed, every model alike; `auto` has 1.5 s with graphs."""
    servers = {
        STOCK: {name: _run(ms) for name, ms in STOCK_MS.items()},
        SERVER: {"auto": _run(1_500.0, layouts), "static-dp": _run(1_600.0)},
        PRODUCT: {"auto": _run(product_ms)},
    }
    return Kept("abcdef0", [dict.fromkeys(MODELS, servers)], date="2026-11-28")


def _rates(**most_rps: float) -> Kept:
    """Return shares within the SLO that fall from 1 to 0 behind a system's highest rate."""
    return Kept(
        "abcdef0",
        [
            {
                f"{rate:g}": {
                    name.replace("_", "-"): float(rate <= most) for name, most in most_rps.items()
                }
                for rate in RATES_RPS
            }
        ],
    )


RATES = _rates(
    auto=5.0, static_dp=4.5, stock_dp=3.0, stock_tp4=4.0, stock_tp8=3.5, shift_parallel=4.5
)


def test_readme_has_what_the_kept_numbers_give() -> None:
    text = live.README.read_text(encoding="utf-8")
    assert live.between_marks(text, front_page.section()) == text


def test_the_table_compares_auto_with_stock_shift_and_its_own_layouts() -> None:
    """Of ten requests nine are in bursts: 0.1 of 2 s and 0.9 of 4 s are 3.8 s."""
    figures = "3.8 (`stock-tp4`) | 4.75 | 1.9 | 2.85 | 0.75 | 1.5 | 0.938 (`static-dp`) | 0"
    assert front_page.table(_phases())[2:-1] == [f"| {model} | {figures} |" for model in MODELS]


def test_each_figure_of_the_table_is_a_mean_of_the_kept_runs() -> None:
    found = kept("phases")
    for model, row in zip(MODELS, front_page.table(found)[2:-1], strict=True):
        ends = [
            sum(phase["mean_e2el_ms"] * phase["requests"] for phase in phases.values())
            / sum(phase["requests"] for phase in phases.values())
            for one in found.seeds
            for phases in [one[model][SERVER]["auto"]["phases"]]
        ]
        shown = float(row.split(" | ")[4])
        assert shown == pytest.approx(sum(ends) / len(ends) / 1e3, rel=0.005)


def test_a_layout_that_was_kept_is_no_gain_of_switching() -> None:
    words = front_page.unswitched(_phases())
    assert words.startswith("For llama-3-70b (1 x TP8), ")
    moved = front_page.unswitched(_phases(layouts=("4 x TP2", "1 x TP8")))
    assert moved == "`auto` changed its layout on each of these loads."


def test_rates_within_the_slo_name_the_best_layouts() -> None:
    expected = "5 (`auto`), 4.5 (`shift-parallel`), 4.5 (`static-dp`), 4 (`stock-tp4`)"
    assert front_page.within_slo(RATES) == expected


@pytest.mark.parametrize(("product_ms", "shown"), [(3_000.0, "1.5"), (1_900.0, "")])
def test_a_model_on_which_the_product_is_behind_is_named(product_ms: float, shown: str) -> None:
    expected = [f"{shown} for {model} (`stock-tp4`)" for model in MODELS] if shown else []
    assert front_page.behind(_phases(product_ms)) == expected


def test_live_ratios_are_to_the_better_layout_of_their_round() -> None:
    assert front_page.live_ratios(LIVE) == pytest.approx([1.1, 1.5])


def test_the_section_says_where_auto_loses() -> None:
    words = " ".join(front_page.text(_phases(), RATES, LIVE, TRACE, EMULATED).split())
    loses = words.partition("**Where it loses.**")[2]
    assert "takes 1.50, 1.50, 1.50 times as long as Shift Parallelism" in loses
    assert re.search(r"1\.5 for llama-3-70b \(`stock-tp4`\).*it took 1\.10, 1\.50 of", loses)
    assert "and 2.20, 3.00 on a trace" in loses
    assert "it took 0.90, 0.50 of the best single stock layout's time" in loses
    assert "up to 1.50 of its mean TTFT" in loses
