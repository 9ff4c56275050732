"""The page of many nodes: what is counted, what is compared, and a page of any numbers."""

from pathlib import Path

import pytest

from experiments import nodes, nodes_runs
from experiments.common import FIRST, Kept, Numbers, Setting

RUN = {
    "requests": 100,
    "not_served": 0,
    "e2e_s": 10.0,
    "p99_e2e_s": 30.0,
    "ttft_s": 1.0,
    "p99_ttft_s": 3.0,
    "switches_per_node": 2.0,
    "most_over_mean": 1.1,
    "hit_rate": 0.4,
}


def systems(**e2e_s: float) -> Numbers:
    """Numbers of all systems, 10 s unless said otherwise."""
    return {
        name: RUN | {"e2e_s": e2e_s.get(name.replace("-", "_"), 10.0)}
        for name in nodes_runs.SYSTEMS
    }


def numbers(counts: list[int]) -> Numbers:
    """Of one seed."""
    return {
        "nodes": {
            str(n): {str(share): systems(auto=8.0 + n) for share in nodes_runs.TOGETHER}
            for n in counts
        },
        "long": {str(share): systems() for share in nodes_runs.EXTREMES},
        "routers": {
            name: {str(share): systems() for share in nodes_runs.EXTREMES}
            for name in nodes_runs.ROUTERS
        },
    }


def test_auto_is_compared_with_one_layout_and_with_the_best() -> None:
    found = systems(auto=9.0, stock_dp=12.0, stock_tp4=8.0, stock_tp=10.0)
    ratios = [nodes.over(other)(found) for other in ("stock-dp", "stock-tp", "best")]
    assert ratios == [pytest.approx(0.75), pytest.approx(0.9), pytest.approx(9 / 8)]


def test_a_page_of_two_seeds(tmp_path: Path) -> None:
    """The seeds that did not serve the most nodes do not count there."""
    fewer = [count for count in nodes_runs.REPLICAS if count != nodes_runs.ONCE]
    found = Kept("1234567", [numbers(list(nodes_runs.REPLICAS)), numbers(fewer)])
    nodes.pages(found, tmp_path)
    text = (tmp_path / "nodes.md").read_text(encoding="utf-8").replace("\n", " ")
    assert "| 1 | 1 | 9 | 10 | 10 | 10 | 0.9 | 0.9 | 0.9 |" in text
    assert "over `stock-dp`: 0.90 with one node and 7.20 with 64 if all burst together" in text
    assert "its P99 time to first token is 1.00 times" in text
    assert "No requests were refused." in text
    assert "`stock-dp` in 7 of 7 runs with 0 together" in text
    assert "in its worst row: `auto` 7.20, `stock-dp` 1.00, `stock-tp4` 1.00" in " ".join(
        text.split()
    )


def test_the_first_seed_alone_serves_the_most_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_runs, "_serve", lambda *_: RUN)
    assert list(nodes.measure(FIRST)["nodes"]) == ["1", "4", "16", "64"]
    assert list(nodes.measure(Setting(seed=2))["nodes"]) == ["1", "4", "16"]
