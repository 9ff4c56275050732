"""The pages of docs/lab/results that are simulated: made of the numbers that are kept, which the
code still finds.
"""

import re
from pathlib import Path

import pytest

from experiments import (
    dynaserve,
    gyges,
    low_phases,
    nodes_runs,
    release_switches,
    table2,
    token_split_runs,
)
from experiments.__main__ import ALL, write_pages
from experiments.common import FIRST, RESULTS, TEMPLATES, kept, paper_workload, run, system
from experiments.dynaserve_runs import Name, lengths, requests, serve, server
from experiments.gyges_runs import RATES
from experiments.rows import label
from flying_serving.config import MODES

PAGES = (
    "against_paper",
    "break_even",
    "dynaserve",
    "fig8",
    "fig9",
    "goodput",
    "gyges",
    "held_out",
    "loads",
    "low_phases",
    "nodes",
    "oracle",
    "parts",
    "phases",
    "release_switches",
    "table1",
    "table2",
    "three_papers",
    "token_split",
)


MODELLED = set(PAGES) - {"dynaserve"}
"""Pages whose simulated groups have collectives."""
GPT_OSS = {
    "against_paper",
    "fig8",
    "fig9",
    "held_out",
    "loads",
    "low_phases",
    "parts",
    "phases",
    "table2",
    "token_split",
}
"""Pages on which GPT-OSS-120B serves requests."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each page's text, of the kept numbers."""
    folder: Path = tmp_path_factory.mktemp("results")
    write_pages(folder)
    return {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}


def test_these_are_all_the_pages(written: dict[str, str]) -> None:
    assert sorted(written) == sorted(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_that_of_the_kept_numbers(written: dict[str, str], name: str) -> None:
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == written[name]


@pytest.mark.parametrize("name", PAGES)
def test_page_names_its_commit_and_explains_every_value(name: str) -> None:
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert re.search(
        r"^- `make experiments ARGS=\w+` at commit [0-9a-f]{7} of \d{4}-\d\d-\d\d: \[numbers\]",
        text,
        re.M,
    )
    assert "not explained yet" not in text


@pytest.mark.parametrize("name", ALL)
def test_no_number_by_construction_is_reversed_by_a_coefficient(name: str, tmp_path: Path) -> None:
    rows = ALL[name].pages(kept(name), tmp_path)
    assert not [one.name for one in rows if label(one) == "by construction" and one.reverses]


def test_every_template_has_text() -> None:
    empty = [path.name for path in TEMPLATES.glob("*.md") if not path.read_text(encoding="utf-8")]
    assert not empty


def test_fig8_says_that_its_low_phases_are_not_low(written: dict[str, str]) -> None:
    assert "the low phases are not low" in " ".join(written["fig8"].split())


def test_low_phases_are_simulated_as_they_are_kept() -> None:
    """The model whose run is the shortest, under the layout that decides nothing."""
    faster = kept("fig8_fig9").seeds[0]["llama-3-70b"]["faster"]
    workload = paper_workload("llama-3-70b", faster, FIRST.seed)
    ended = run(system("stock-dp", "llama-3-70b", FIRST), "llama-3-70b", workload).outcome.ended
    then = kept("low_phases").seeds[0]["llama-3-70b"]["stock-dp"]
    assert _flat(low_phases.by_part(ended, workload)) == pytest.approx(_flat(then), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_switches_are_simulated_as_they_are_kept(mode: str) -> None:
    rate = release_switches.RATES[0]
    then = kept("release_switches").seeds[0][release_switches.run_name(rate, mode)]
    found = release_switches.measure_one(rate, mode, FIRST)
    assert found.keys() == then.keys()
    for name, value in found.items():
        assert value == pytest.approx(then[name], rel=1e-6), name


def test_capacities_and_a_switch_are_simulated_as_they_are_kept() -> None:
    then = kept("table2").seeds[0]
    assert table2.capacities(FIRST) == then["capacity"]
    assert table2.cutover_ms(FIRST) == pytest.approx(then["switch_ms"], rel=1e-6)


@pytest.mark.parametrize("system", ["disagg", "coloc"])
def test_dynaserve_baselines_are_simulated_as_they_are_kept(system: Name) -> None:
    shape = "P8192-D32"
    then = kept("dynaserve").seeds[0]["table1"][shape][system]
    rate = dynaserve.TABLE1[shape][system]["rps"]
    found = serve(server(system), requests(lengths(shape), rate, FIRST.seed)).figures
    assert found == pytest.approx({name: then[name] for name in found}, rel=1e-6)


def test_split_requests_are_simulated_near_what_is_kept() -> None:
    """Times of the planner are measured: they are compared with its bar, one millisecond and six
    probes.
    """
    kept_once = kept("dynaserve").seeds[0]
    then = kept_once["batches"]
    found = dynaserve._batches(kept_once["capacity"]["BurstGPT"]["split"]["rps"], FIRST.seed)
    assert found["with"] == pytest.approx(then["with"], abs=0.01)
    assert found["without"] == pytest.approx(then["without"], abs=0.05)
    assert found["split"] == pytest.approx(then["split"], abs=0.01)
    assert found["split"] > 0.0
    assert then["plan_ms"]["99"] < 1.0
    assert max(found["probes"], then["probes"]) <= 6


def test_lent_weights_are_simulated_as_they_are_kept() -> None:
    """All that no request is served for, and the shortest of the runs, with every system."""
    then = kept("gyges").seeds[0]
    for name, value in gyges.measure_derived().items():
        assert _flat(value) == pytest.approx(_flat(then[name]), rel=1e-6), name
    rate = min(RATES)
    assert _flat(gyges._traced(rate, FIRST.seed)) == pytest.approx(
        _flat(then["trace"][str(rate)]), rel=1e-6
    )


def test_nodes_behind_a_router_are_simulated_as_they_are_kept() -> None:
    """Four nodes whose prompts begin alike, with the router that looks for that."""
    then = kept("nodes").seeds[0]["routers"]["cache-aware"]["1.0"]
    found = nodes_runs.measure_router("cache-aware", 1.0, FIRST)
    assert _flat(found) == pytest.approx(_flat(then), rel=1e-6)


def test_prompts_split_by_tokens_are_simulated_as_they_are_kept() -> None:
    """The cell whose runs are the shortest, with the lane and without."""
    cell = token_split_runs.Cell("llama-3-70b", "short", 0.3)
    then = kept("token_split").seeds[0][cell.model]
    assert token_split_runs.prompt_parts(cell.model, FIRST) == pytest.approx(then["prompt"])
    capacity_rps = then["capacity_rps"][cell.outputs]
    for name in ("stock-dp", *token_split_runs.LANES):
        found = token_split_runs.serve(name, cell, capacity_rps, FIRST)
        assert found == pytest.approx(then[cell.name][name], rel=1e-6), name


def _flat(numbers: object, name: str = "") -> dict[str, float]:
    """Numbers of all levels by their path."""
    if not isinstance(numbers, dict):
        return {name: float(numbers)}  # type: ignore[arg-type]
    return {
        path: value
        for key, inner in numbers.items()
        for path, value in _flat(inner, f"{name}/{key}").items()
    }
