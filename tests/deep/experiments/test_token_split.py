"""The page of prompts that are split by tokens: its comparisons, its rule, and a page of any
numbers.
"""

from pathlib import Path

import pytest

from experiments import token_split, token_split_runs
from experiments.common import FIRST, MODELS, ROOT, Kept, Numbers, kept
from experiments.token_split_runs import CELLS, FIGURES, LANES, Cell
from flying_lab.sim.requests import SimRequest

PLAN = ROOT / "experiments" / "plans" / "token_split.md"
CELL = Cell("llama-3-70b", "short", 0.3)


def numbers(**mean_e2e_s: float) -> Numbers:
    """Numbers of one seed: every figure is 10 s, the mean E2E unless said otherwise."""
    same = dict.fromkeys(FIGURES, 10.0)
    found: Numbers = {}
    for model in MODELS:
        systems = (*token_split_runs.fixed_systems(model), *LANES)
        found[model] = {
            "capacity_rps": {"short": 8.0, "long": 4.0},
            "prompt": {"engines": 4, **dict.fromkeys(token_split.PARTS, 1.0)},
        }
        for cell in CELLS:
            if cell.model == model:
                found[model][cell.name] = {
                    name: same | {"mean_e2e_s": mean_e2e_s.get(name.replace("-", "_"), 10.0)}
                    for name in systems
                }
    return found


def test_each_figure_is_compared_with_the_best_layout_of_that_figure() -> None:
    found = Kept("1234567", [numbers(token_split=9.0, stock_tp4=8.0)])
    assert token_split.ratios(found, CELL, "token-split", "mean_e2e_s") == [9.0 / 8.0]
    assert token_split.ratios(found, CELL, "token-split", "p90_e2e_s") == [1.0]
    run = found.seeds[0][CELL.model][CELL.name]
    assert token_split.best(run, CELL.model, "mean_e2e_s") == (8.0, "stock-tp4")


@pytest.mark.parametrize(
    ("seconds", "ahead"), [((9.4, 9.0), True), ((9.4, 9.6), False), ((9.6, 9.6), False)]
)
def test_a_lane_is_ahead_by_five_percent_with_every_seed(
    seconds: tuple[float, ...], ahead: bool
) -> None:
    found = Kept("1234567", [numbers(token_split=value) for value in seconds])
    assert token_split.is_ahead(found, CELL, "token-split") == ahead
    assert token_split.is_worth_building(found) == ahead


def test_four_cells_of_two_models_are_needed() -> None:
    one = numbers()
    for model in MODELS[:2]:
        for cell in [cell for cell in CELLS if cell.model == model][:4]:
            one[model][cell.name]["token-split"]["mean_e2e_s"] = 5.0
    assert token_split.is_worth_building(Kept("1234567", [one]))
    one[MODELS[0]][CELL.name]["token-split"]["mean_e2e_s"] = 10.0
    assert token_split.cells_ahead(Kept("1234567", [one]), MODELS[0], "token-split") == 3
    assert not token_split.is_worth_building(Kept("1234567", [one]))


def test_rule_and_loads_are_those_of_the_plan() -> None:
    text = " ".join(PLAN.read_text(encoding="utf-8").split())
    for fact in (
        f"at most {token_split.AHEAD:g} of the least mean E2E",
        "ahead in at least four of the model's six cells",
        "two of the three models",
        "Poisson at 0.3, 0.5 and 0.7 of the capacity of `static-dp`",
        "*short* 16 to 128 tokens, *long* 256 to 1,024",
        "for 60 s, or for 600 requests",
        "Requests of the first third are not counted",
        "four times as many requests at once as it may run",
    ):
        assert fact in text, fact
    assert token_split_runs.LOADS == (0.3, 0.5, 0.7)
    assert token_split_runs.OUTPUTS == {"short": (16, 128), "long": (256, 1024)}
    assert (token_split.CELLS_AHEAD, token_split.MODELS_AHEAD) == (4, 2)
    assert (token_split_runs.LEAST_S, token_split_runs.LEAST_REQUESTS) == (60.0, 600)
    assert (token_split_runs.UNCOUNTED, token_split_runs.ROUNDS) == (1 / 3, 4)


def test_figures_are_of_the_requests_that_count() -> None:
    requests = [
        SimRequest(str(n), 10, 3, float(n), first_token_s=n + 1.0, end_s=n + 5.0, tokens=3)
        for n in range(3)
    ]
    found = token_split_runs.figures(requests)
    assert (found["mean_ttft_s"], found["p90_ttft_s"]) == (1.0, 1.0)
    assert (found["mean_tpot_s"], found["mean_e2e_s"]) == (2.0, 5.0)


def test_fixed_systems_are_each_degree_above_an_engine_and_shift() -> None:
    wide = ["stock-tp4", "stock-tp8", "shift-parallel"]
    assert token_split_runs.fixed_systems("llama-3-70b") == ["stock-dp", *wide]
    assert token_split_runs.fixed_systems("nemotron-8b") == ["stock-dp", "stock-tp2", *wide]


def test_parts_of_a_prompt_are_the_ones_that_the_page_shows() -> None:
    parts = token_split_runs.prompt_parts("llama-3-70b", FIRST)
    assert parts.keys() == {"engines", *token_split.PARTS}
    assert parts["weights"] + parts["all_to_all"] < parts["token"] < parts["tensor"]
    assert parts["token"] < parts["engine"] < parts["engines"] * parts["token"]


def test_bounds_are_as_the_page_says_in_the_kept_numbers() -> None:
    """Its sentences that hold no number."""
    found = kept("token_split")
    for run in found.seeds:
        for model in MODELS:
            parts = run[model]["prompt"]
            for lane in ("token", "tensor"):
                assert parts["engines"] * parts[lane] > parts["engine"]
            links = parts["all_to_all"] + parts["pull"]
            assert links < parts["token"] - parts["engine"] / parts["engines"]
    for cell in CELLS:
        for run in token_split._runs(found, cell):
            fused, woven = run["token-split-fused"], run["token-split"]
            assert fused["mean_e2e_s"] < woven["mean_e2e_s"]
            assert run["free-prompts"]["mean_e2e_s"] < fused["mean_e2e_s"]
        if cell.outputs == "long" and cell.load < 0.7:
            assert not token_split.is_ahead(found, cell, "free-prompts")
        if (cell.outputs, cell.load) == ("long", 0.3):
            for run in token_split._runs(found, cell):
                lane, apart = run["token-split"], run["stock-dp"]
                dense = cell.model != "gpt-oss-120b"
                assert (lane["mean_ttft_s"] < apart["mean_ttft_s"]) == dense
                assert lane["mean_tpot_s"] > apart["mean_tpot_s"]


def test_no_request_was_refused_and_enough_count() -> None:
    for cell in CELLS:
        for run in token_split._runs(kept("token_split"), cell):
            assert {one["refused"] for one in run.values()} == {0}
            assert min(one["requests"] for one in run.values()) > 300


def test_a_page_of_two_seeds(tmp_path: Path) -> None:
    found = Kept("1234567", [numbers(token_split=9.0), numbers(token_split=8.0)])
    assert token_split.pages(found, tmp_path) == []
    text = (tmp_path / "token_split.md").read_text(encoding="utf-8")
    ratios = "| 1 | 1 | 1 | 1 | 0.85 | 1 |"
    assert f"| llama-3-70b | short | 0.3 {ratios} shift-parallel | yes |" in text
    assert "| llama-3-70b | short | 0.3 | 1 | 0.85 | 1 | 1 | 1 | 1 |" in text
    flat = " ".join(text.split())
    assert "the lane is worth building: `token-split` is ahead in 18 of 18 cells" in flat
    assert "4.00 (llama-3-70b), 4.00 (gpt-oss-120b), 4.00 (nemotron-8b)" in flat
    assert "| 0.3 | stock-dp | 10,000 | 10,000 | 10,000 | 10,000 | 10,000 | 10,000 |" in text
    assert "Capacity of `stock-dp`: 8 requests/s." in text
