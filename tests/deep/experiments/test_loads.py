"""The loads of docs/lab/results/loads.md: their rates, their long prompts, and that seeds draw
them.
"""

from __future__ import annotations

from statistics import mean

import pytest

from experiments import loads, parts, run_history
from experiments.common import MODELS, Kept, kept
from experiments.loads_load import CROWD, DAY, LOADS, LONG_TOKENS, MIXTURE, RARE, SAW, load
from experiments.phases_load import CAPACITY_RPS
from flying_lab.workload.model import Workload

MODEL = "llama-3-70b"


def rate(work: Workload, from_s: float, to_s: float) -> float:
    """Arrivals per second between two times, as a share of the model's capacity."""
    count = sum(from_s <= request.arrival_s < to_s for request in work.requests)
    return count / (to_s - from_s) / CAPACITY_RPS[MODEL]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", LOADS)
def test_each_load_has_requests_that_its_seed_draws(name: str, model: str) -> None:
    first, other = load(name, model, 1), load(name, model, 2)
    assert len(first.requests) > 100
    assert first.requests != other.requests
    assert load.__wrapped__(name, model, 1) == first


def test_rare_bursts_are_the_last_seconds_of_their_periods() -> None:
    work = load(RARE, MODEL, 1)
    for period, share in enumerate((0.85, 1.2, 0.85, 1.2)):
        ends_s = 300.0 * (period + 1)
        assert rate(work, ends_s - 300.0, ends_s - 15.0) == pytest.approx(0.1, rel=0.25)
        assert rate(work, ends_s - 15.0, ends_s) == pytest.approx(share, rel=0.35)


def test_a_day_is_busy_in_the_middle_and_a_saw_at_the_end_of_a_tooth() -> None:
    day, saw = load(DAY, MODEL, 1), load(SAW, MODEL, 1)
    assert rate(day, 0.0, 60.0) < 0.2 < 0.75 < rate(day, 540.0, 660.0)
    assert rate(day, 0.0, 1200.0) == pytest.approx(0.5, rel=0.1)
    for tooth in range(4):
        assert rate(saw, 100.0 * tooth, 100.0 * tooth + 20.0) < 0.35
        assert rate(saw, 100.0 * tooth + 80.0, 100.0 * (tooth + 1)) > 0.7


def test_one_prompt_in_forty_is_long() -> None:
    prompts = [request.prompt_tokens for request in load(MIXTURE, "nemotron-8b", 1).requests]
    assert mean(tokens == LONG_TOKENS for tokens in prompts) == pytest.approx(1 / 40, rel=0.3)


def test_crowds_arrive_together() -> None:
    requests = load("crowds", MODEL, 1).requests
    assert len(requests) % CROWD == 0
    assert len({request.arrival_s for request in requests}) == len(requests) // CROWD


def test_the_page_has_the_run_in_which_loads_were_unseen() -> None:
    first = run_history.read()["loads"][0]
    assert first["commit"] == "ee36bb8"
    found = kept("loads")
    lines = run_history.section("loads", found, loads.run_cells(found))
    assert first["cells"].keys() == loads.run_cells(found).keys()
    assert any("ee36bb8" in line and found.at in line for line in lines)


def test_a_chunk_with_less_e2e_is_named_with_its_first_tokens() -> None:
    """Figures of vLLM's default and of three other chunks."""
    cells = {"all": (4.0, 50.0), "auto, 4096": (5.0, 40.0), "auto, 2048": (3.0, 100.0)}
    every = {**cells, "auto, 1024": (6.0, 10.0)}
    numbers = {name: dict(zip(parts.FIGURES, each, strict=True)) for name, each in every.items()}
    found = Kept("abcdef0", [{"m": numbers}])
    assert (
        parts.least_by_chunk(found, "m") == "2,048 (0.75 of the E2E with 8,192, and 2 of its TTFT)"
    )
    numbers["all"] = dict.fromkeys(parts.FIGURES, 3.0)
    assert parts.least_by_chunk(found, "m") == "8,192"
