"""The figures of each phase of the demo's load, in a table and in sentences."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flying_lab.bench.switchlog import LoggedSwitch
from flying_lab.demo import phases
from flying_lab.demo.__main__ import COLUMNS
from flying_lab.demo.phases import FIGURES
from flying_lab.results.record import Record
from flying_lab.results.results import Results, Run
from flying_lab.workload.model import Request
from tests.unit.lab.demo.figures import BURST, PHASES, QUIET, SERVERS, phase

START_S = 1000.0
APART, TOGETHER = ((0,), (1,)), ((0, 1),)
SWITCHES = [
    LoggedSwitch(1, START_S - 0.2, APART, TOGETHER, "load: 0.05 requests/s", "weave", 1),
    LoggedSwitch(2, START_S + 11.3, TOGETHER, APART, "load: 1.45 requests/s", "migrate", 3),
]
RESULTS = Results.of(
    Run("demo", "", 1, "http://there", "m", START_S, 20.0),
    [
        Record(Request(number, arrival_s, 8, 2, phase=name))
        for number, (arrival_s, name) in enumerate(
            [(0.0, "quiet"), (2.2, "quiet"), (11.0, "burst")]
        )
    ],
)


def shown(figures: list[phases.PhaseFigures]) -> list[str]:
    """Return the lines of the table on the demo's console."""
    text = io.StringIO()
    Console(width=COLUMNS, file=text).print(phases.table(figures))
    return text.getvalue().splitlines()


def test_phases_come_from_the_summaries_in_their_order() -> None:
    summaries = {
        server: {
            "phases": {
                figures.name: {"num_prompts": 20, "p99_ttft_ms": 9.0, **figures.by_server[server]}
                for figures in PHASES
            }
        }
        for server in SERVERS
    }
    assert phases.phases_of(summaries) == list(PHASES)


def test_the_better_fixed_layout_is_the_one_with_the_lower_mean() -> None:
    assert [(one.best, one.other) for one in (QUIET, BURST)] == [
        ("static-tp", "static-dp"),
        ("static-dp", "static-tp"),
    ]


def test_auto_is_measured_by_the_better_fixed_layout_of_each_phase() -> None:
    assert [round(one.ratio(phases.AUTO), 2) for one in PHASES] == [1.1, 1.1, 0.95]


@pytest.mark.parametrize("mean_ms", [0.01, 1234.5, 123456.7])
def test_the_table_fits_the_demos_columns(mean_ms: float) -> None:
    lines = shown([phase("quiet", (mean_ms,) * 3)])
    assert max(map(len, lines)) <= COLUMNS
    assert not any("…" in line for line in lines)


def test_the_table_has_a_row_for_each_server_with_all_figures() -> None:
    rows = [line for line in shown([QUIET]) if line.count("1400") == len(FIGURES)]
    assert len(rows) == 1
    assert "engines apart" in rows[0]


def test_the_table_says_that_devices_are_emulated() -> None:
    assert any("emulated devices" in line for line in shown([QUIET]))


def test_each_switch_says_when_and_why() -> None:
    assert list(phases.decisions(RESULTS, SWITCHES)) == [
        "\nthe switches of auto; a layout is the engines of each group:",
        "  -0.2 s, test request: 1+1 to 2 by weave, 1 in flight",
        "    because of load: 0.05 requests/s",
        "  11.3 s, burst: 2 to 1+1 by migrate, 3 in flight",
        "    because of load: 1.45 requests/s",
    ]


def test_server_without_switches_shows_no_decision() -> None:
    assert list(phases.decisions(RESULTS, []))[1:] == ["  none"]


def test_the_conclusion_tells_layouts_switches_and_distances() -> None:
    text = " ".join(phases.conclusion(PHASES, SWITCHES).split())
    assert "engines apart answered faster in 'burst'" in text
    assert "engines together answered faster in 'quiet' and 'after'" in text
    assert "joined its engines once and parted them once" in text
    assert "1.10 in 'burst' (engines together: 1.40)" in text
