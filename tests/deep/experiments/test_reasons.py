"""Reasons for numbers that are worse: their figures are on the page, and what they say holds of the
numbers that are kept.
"""

import re
from pathlib import Path
from statistics import mean

import pytest

from experiments import dynaserve_runs, reasons
from experiments.__main__ import ALL
from experiments.common import RESULTS, Numbers, kept
from flying_lab.sim import models

TABLES = {
    "fig8": "fig8",
    "fig9": "fig9",
    "table1": "table1",
    "table2": "table2",
    "context": "table2",
    "release_switches": "release_switches",
    "dynaserve": "dynaserve",
    "gyges": "gyges",
}
"""The page of each table that has reasons."""
FIGURE = re.compile(r"(?<![\w.-])\d[\d,.]*\d")
"""Of two digits and more: a table or a degree has one."""
LINK = re.compile(r"\]\((?:\.\./)?(\w+)\.md\)")
NO_ROW = {
    "0.32": "vLLM's version",
    "2,048": "the shape's tokens",
    "31": "gaps of 32 tokens",
    "95": "the paper's",
    "101": "the paper's",
    "125": "the paper's",
    "125,000": "the paper's",
    "952": "the paper's",
    "1.9": "the paper's",
    "27": "522 / 19.3",
    "1.7": "test_kv_memory_of_dynaserve_is_larger_than_the_papers",
}
"""Figures of reasons that no page has, and what they are."""


def _page(name: str) -> str:
    path = RESULTS / f"{name}.md"
    return (path if path.exists() else RESULTS.parent / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", TABLES)
def test_a_figure_of_a_reason_is_on_the_page_or_on_one_that_it_names(table: str) -> None:
    own = "\n".join(line for line in _page(TABLES[table]).splitlines() if not line.startswith("- "))
    for (name, *_), (_, text) in reasons.REASONS.items():
        if name == table:
            pages = [own, *(_page(other) for other in LINK.findall(text))]
            known = {figure for page in pages for figure in FIGURE.findall(page)} | set(NO_ROW)
            plain = re.sub(r"\d{4}-\d\d-\d\d|\b(?=\w*[a-f])[0-9a-f]{7,8}\b", "", text)
            assert set(FIGURE.findall(plain)) <= known, text


def test_no_reason_was_found_for_another_value(tmp_path: Path) -> None:
    """Else it is to be checked again."""
    stale = [
        row.name
        for name in ("fig8_fig9", "table1", "table2", "release_switches", "dynaserve", "gyges")
        for row in ALL[name].pages(kept(name), tmp_path)
        if row.why.startswith("(found when")
    ]
    assert not stale


# ---- what they say


def _systems(model: str, limit: int) -> dict[str, dict[str, float]]:
    """Means over the seeds of figures 8 and 9."""
    runs: list[Numbers] = [one[model][f"max_num_seqs {limit}"] for one in kept("fig8_fig9").seeds]
    return {
        name: {figure: mean(run[name][figure] for run in runs) for figure in runs[0][name]}
        for name in runs[0]
    }


@pytest.mark.parametrize(("other", "paper"), [("stock-tp", 1.66), ("shift-parallel", 1.3)])
def test_a_wide_engine_waits_for_places(other: str, paper: float) -> None:
    few, more = _systems("llama-3-70b", 256), _systems("llama-3-70b", 1024)
    assert few[other]["burst_p90_queue_s"] > 0.95 * few[other]["burst_p90_ttft_s"]
    ratios = [
        one[other]["burst_p90_ttft_s"] / one["auto"]["burst_p90_ttft_s"] for one in (few, more)
    ]
    assert abs(ratios[1] - paper) < abs(ratios[0] - paper)


@pytest.mark.parametrize("model", ["gpt-oss-120b", "nemotron-8b"])
def test_no_layout_begins_sooner_in_bursts_than_apart(model: str) -> None:
    found = _systems(model, 256)
    for figure, most in (("burst_mean_ttft_s", 1.11), ("burst_p90_ttft_s", 1.07)):
        fixed = [name for name in found if name.startswith("stock-")]
        assert min(fixed, key=lambda name: found[name][figure]) == "stock-dp"
        assert found["auto"][figure] < most * found["stock-dp"][figure]
    assert found["auto"]["median_tpot_ms"] == pytest.approx(
        found["stock-dp"]["median_tpot_ms"], rel=0.03
    )


def test_median_tpot_of_llama_differs_little_by_layout() -> None:
    found = _systems("llama-3-70b", 256)
    of_dp = found["stock-dp"]
    assert all(one["median_tpot_ms"] > 0.5 * of_dp["median_tpot_ms"] for one in found.values())
    low = found["auto"]["low_median_tpot_ms"] / of_dp["low_median_tpot_ms"]
    assert low == pytest.approx(0.57, abs=0.02)


def test_late_dispatch_has_the_peak_of_auto_without_its_layouts() -> None:
    found = {name: one["peak_tokens_per_s"] for name, one in _systems("llama-3-70b", 256).items()}
    for fork in ("fork", "fork, two thresholds"):
        assert found[fork] == pytest.approx(found["auto"], rel=0.02)
    assert found["auto"] > 1.03 * max(found[name] for name in ("stock-dp", "stock-tp4"))


def test_sequential_switches_have_long_gaps_too() -> None:
    runs = kept("release_switches").seeds
    alone, migrate, weave = (
        mean(one[f"1.5 {mode}"]["gap"] for one in runs)
        for mode in ("sequential", "migrate", "weave")
    )
    assert alone > 0.9 * migrate
    assert alone == pytest.approx(weave / 2, rel=0.15)


def test_one_request_is_in_the_widest_group_and_several_are_not() -> None:
    for model, found in kept("table2").seeds[0]["longest"].items():
        layouts = found["auto"]["layouts"]
        assert [name for _, name in layouts["alone"]] == ["1 x TP8"], model
        assert len(layouts["together"]) > 1, model


def test_the_paper_needs_more_memory_than_a_device_has() -> None:
    """settings.md: half of the weights and an eighth of the KV of 1,992,294 tokens."""
    model = models.load("llama-3-70b")
    kv_bytes = 2 * 2 * model.layers * model.kv_heads * model.head_dim
    needed = model.weight_bytes(1) / 2 + 1_992_294 * kv_bytes / 8
    assert needed / 1e9 == pytest.approx(152, abs=1)


def test_kv_memory_of_dynaserve_is_larger_than_the_papers() -> None:
    (tokens,) = dynaserve_runs.server("coloc").settings.capacity.kv_tokens.values()
    assert tokens / 125_000 == pytest.approx(1.7, abs=0.05)


def test_every_split_of_dynaserve_is_inside_one_chunk() -> None:
    assert all(one["pulls"]["behind"] == one["pulls"]["at_once"] for one in kept("dynaserve").seeds)
