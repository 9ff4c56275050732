"""`auto` beside one layout that is kept for every load: stock's first, then our own."""

from collections.abc import Mapping

import pytest

from experiments import held_out, held_out_regret, live
from experiments.common import MODELS, Kept, Numbers, kept
from experiments.held_out_load import LOADS
from experiments.held_out_ratios import Place, best, ratios
from experiments.servers import GRAPHS, PRODUCT, STOCK

FIRST, *OTHERS = (load.name for load in LOADS)
OURS_MS = {"static-dp": (200.0, 200.0), "static-tp8": (150.0, 150.0)}
"""Mean E2E of our fixed layouts on the first load, and on each other one."""
STOCK_MS = {
    "stock-dp": (200.0, 100.0),
    "stock-tp8": (50.0, 150.0),
    "shift-parallel": (40.0, 80.0),
}


def _server(found_ms: Mapping[str, tuple[float, float]]) -> Numbers:
    return {
        load: {
            name: {
                "requests": 1,
                "per_minute": 0.0,
                "switches": [],
                "layouts": {"1 x TP8": 1.0},
                **dict.fromkeys(("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"), ms[rest]),
            }
            for name, ms in found_ms.items()
        }
        for rest, loads in enumerate(([FIRST], OTHERS))
        for load in loads
    }


@pytest.fixture(scope="module")
def found() -> Kept:
    """Every model alike. `auto` has 100 ms with graphs and 120 ms as the product runs."""
    ours = {
        server: _server({"auto": (ms, ms), **OURS_MS})
        for server, ms in ((GRAPHS, 100.0), (PRODUCT, 120.0))
    }
    numbers = {model: {**ours, STOCK: _server(STOCK_MS)} for model in MODELS}
    return Kept("abcdef0", [{"constants": {}, **numbers}], date="2026-11-28")


def _place(server: str, load: int) -> Place:
    return Place(MODELS[0], server, LOADS[load])


def test_a_ratio_to_stock_is_to_its_best_layout_on_that_load(found: Kept) -> None:
    """And not to that of our own server, nor to Shift Parallelism."""
    assert ratios(found, _place(GRAPHS, 0), "auto", beside=STOCK) == [2.0]
    assert ratios(found, _place(GRAPHS, 1), "auto", beside=STOCK) == [1.0]
    assert ratios(found, _place(GRAPHS, 1), "auto") == [100.0 / 150.0]
    assert best(found, _place(STOCK, 0)) == "stock-tp8"
    assert best(found, _place(STOCK, 1)) == "stock-dp"


def test_regret_is_the_geometric_mean_over_the_loads_and_the_worst(found: Kept) -> None:
    one = held_out_regret.regret(found, MODELS[0], GRAPHS, "auto", STOCK)
    assert one.mean == pytest.approx(2.0 ** (1 / len(LOADS)))
    assert one.worst == 2.0
    assert held_out_regret.regret(found, MODELS[0], STOCK, "stock-dp").worst == 4.0


def test_the_layout_to_keep_has_the_least_mean_and_not_the_least_worst(found: Kept) -> None:
    assert held_out_regret.kept_for_all(found, MODELS[0], STOCK) == "stock-dp"
    assert held_out_regret.kept_for_all(found, MODELS[0], GRAPHS) == "static-tp8"


def test_the_headline_has_stock_then_shift_parallelism_then_our_own(found: Kept) -> None:
    """1.05 is 2 ** (1 / 15); 1.1 is 4 ** (1 / 15); 0.8 is Shift Parallelism's on every load."""
    text = held_out_regret.headline(found)
    parts = [
        "of `auto` is 1.05 (worst load 2) with graphs, and 1.26 (worst load 2.4) as the product",
        "The one stock layout that is best to keep for all loads has 1.1 (worst load 4)",
        "Shift Parallelism, as it is modelled, has 0.8 (worst load 0.8)",
        "`auto` has 0.667 to 0.8 (worst load 0.8), and the best one to keep 1 (worst load 1)",
    ]
    assert sorted(parts, key=text.index) == parts


def test_the_section_names_the_best_layout_to_keep(found: Kept) -> None:
    lines = held_out_regret.section(found)
    stock = next(line for line in lines if line.startswith(f"| {MODELS[0]} | 1.05, 2 |"))
    assert "| 1.1, 4 (stock-dp) | 1.46, 1.5 (stock-tp8) | 0.8, 0.8 |" in stock
    own = next(line for line in lines if line.startswith(f"| {MODELS[0]} | {PRODUCT} |"))
    assert "| 0.8, 0.8 | 1, 1 (static-tp8) | 1.33, 1.33 (static-dp) |" in own


def test_a_load_has_its_ratio_to_stock_and_the_layout_that_is_best(found: Kept) -> None:
    headings, _, first, *_ = held_out._table(found, MODELS[0], GRAPHS)
    column = headings.split(" | ").index("E2E / best stock layout")
    assert first.split(" | ")[column] == "2 (stock-tp8)"
    stock = held_out._table(found, MODELS[0], STOCK)[2]
    assert stock.startswith(f"| {FIRST} | 0.05 (stock-tp8) | stock-dp 4, stock-tp8 1,")


# ---- the kept numbers


def test_benchmarks_begin_with_stock_and_its_numbers_are_kept() -> None:
    measured = live.BENCHMARKS.read_text(encoding="utf-8").partition(live.BEGIN)[2]
    assert held_out_regret.headline(kept("held_out")) in " ".join(measured.split())
