"""Headline pages: one short run of each is simulated as its numbers are kept.

Runs of fixed layouts, which change only if the simulator or the cost model does. `auto` has other
numbers with each change of a policy, so those of a page are of the commit that it names.
"""

import pytest

from experiments import break_even, fig8_fig9, oracle, paper_runs, servers, table1
from experiments.common import FIRST, MAX_NUM_SEQS, PAPER, kept, paper_workload, run
from flying_lab.sim.cluster import Options
from flying_lab.sim.node import System

LLAMA = "llama-3-70b"


def _near(then: dict[str, float]) -> dict[str, float]:
    """Values within rounding of other versions of libraries."""
    return pytest.approx(then, rel=1e-6)  # type: ignore[no-any-return]


def test_figures_8_and_9_are_simulated_as_they_are_kept() -> None:
    """The bursts, the low load and the peak of stock TP."""
    then = kept("fig8_fig9").seeds[0][LLAMA]
    workload = paper_workload(LLAMA, then["faster"], FIRST.seed)
    done = run(stock_tp(), LLAMA, workload)
    figures = then[paper_runs.key(MAX_NUM_SEQS)]["stock-tp"]
    found = fig8_fig9.figures_of(done, LLAMA, FIRST.seed)
    assert {name: found[name] for name in figures} == _near(figures)


def stock_tp() -> System:
    """Stock vLLM's widest engine."""
    return servers.stock("stock-tp", LLAMA, FIRST, Options(max_num_seqs=MAX_NUM_SEQS))


def test_figure_8_finds_its_rate_of_bursts_in_what_the_paper_reports() -> None:
    """Stock DP's mean time to first token, with the rate that was found, is the published one."""
    then = kept("fig8_fig9").seeds[0][LLAMA][paper_runs.key(MAX_NUM_SEQS)]["stock-dp"]
    published_s = PAPER[LLAMA]["burst_dp_ttft_s"]
    assert then["burst_mean_ttft_s"] == pytest.approx(published_s, rel=0.05)


@pytest.mark.parametrize("longest", [table1.PAPERS, table1.SHORTER])
def test_table_1_is_simulated_as_it_is_kept(longest: int) -> None:
    then = kept("table1").seeds[0][str(longest)][paper_runs.key(MAX_NUM_SEQS)]["stock-tp"]
    found = table1.measure_one(stock_tp(), longest, FIRST.seed)
    assert found == _near({name: then[name] for name in found})


def test_table_1_presses_at_the_first_rate_at_which_stock_tp_collapses() -> None:
    *held, (_, collapsed_ms) = table1.pressing()
    assert collapsed_ms >= table1.COLLAPSED_MS
    assert all(ttft_ms < table1.COLLAPSED_MS for _, ttft_ms in held)


def test_figures_8_and_9_have_every_degree_and_both_eager_servers() -> None:
    names = [one.name for one in paper_runs.systems("nemotron-8b", FIRST)]
    assert names == [
        *("auto", "stock-dp", "stock-tp2", "stock-tp4", "stock-tp", "shift-parallel"),
        *(paper_runs.PRODUCT, "fork", paper_runs.FORK),
    ]


def test_every_system_of_the_figures_has_the_limit_and_the_max_tokens() -> None:
    for limit in paper_runs.LIMITS:
        for one in paper_runs.systems(LLAMA, FIRST, limit):
            assert one.settings.limits.max_num_seqs == limit
            assert one.max_tokens is not None
            assert one.max_tokens(10) == servers.MAX_TOKENS


@pytest.mark.parametrize("system_name", ["stock-tp4", "shift-parallel"])
def test_systems_beside_the_oracle_are_simulated_as_they_are_kept(system_name: str) -> None:
    then = kept("oracle").seeds[0]["azure code"][system_name]
    assert oracle.measure_one(system_name, "azure code", FIRST) == _near(then)


def test_fixed_layouts_of_the_break_even_are_simulated_as_they_are_kept() -> None:
    then = kept("break_even").seeds[0]["alternating"]
    for stock in break_even.STOCK:
        mean_s, switches = break_even.mean_s(stock, "alternating", FIRST)
        assert mean_s == pytest.approx(then[stock], rel=1e-6), stock
        assert switches == 0


def test_a_switch_that_stops_engines_for_seconds_costs_latency() -> None:
    """The first and the last cost of the page, on its workload."""
    free_s, switches = break_even.mean_s("auto", "alternating", FIRST, break_even.COSTS_S[0])
    dear_s, _ = break_even.mean_s("auto", "alternating", FIRST, break_even.COSTS_S[-1])
    assert switches > 0
    assert dear_s > 2 * free_s
