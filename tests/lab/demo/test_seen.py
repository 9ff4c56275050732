"""What the demo says of three servers with the same load."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flying_lab.bench.switchlog import LoggedSwitch, SwitchLog
from flying_lab.demo import seen
from flying_lab.demo.__main__ import COLUMNS
from flying_lab.demo.seen import Seen
from flying_lab.results.record import Record
from flying_lab.results.results import Results, Run
from flying_lab.workload.model import Request

START_S = 1000.0
APART, TOGETHER = ((0,), (1,)), ((0, 1),)
QUIET = Seen("quiet", 5, {"static-dp": 1.36, "static-tp": 0.8, "auto": 1.0})
BURST = Seen("burst", 48, {"static-dp": 1.0, "static-tp": 3.0, "auto": 1.5})
WHOLE = Seen(seen.ALL, 53, {"static-dp": 1.04, "static-tp": 2.79, "auto": 1.3})
LOG = SwitchLog(
    APART,
    1,
    (
        LoggedSwitch(
            1, START_S - 0.2, APART, TOGETHER, "load: 0.05 requests/s, 0 waiting", "weave", 1
        ),
        LoggedSwitch(
            2, START_S + 11.3, TOGETHER, APART, "load: 1.45 requests/s, 1 waiting", "migrate", 3
        ),
    ),
)
RESULTS = Results.of(
    Run("demo", "", 1, "http://there", "m", START_S, 20.0),
    [
        Record(Request(number, arrival_s, 8, 2, phase=phase))
        for number, (arrival_s, phase) in enumerate(
            [(0.0, "quiet"), (2.2, "quiet"), (11.0, "burst")]
        )
    ],
)


def summary(quiet_ms: float, burst_ms: float, all_ms: float) -> dict[str, object]:
    """What is used of one."""
    phases = {
        "quiet": {"num_prompts": 5, "mean_e2el_ms": quiet_ms},
        "burst": {"num_prompts": 48, "mean_e2el_ms": burst_ms},
    }
    return {"phases": phases, "num_prompts": 53, "mean_e2el_ms": all_ms}


def test_phases_come_from_the_summaries_with_all_requests_at_the_end() -> None:
    summaries = {
        "static-dp": summary(1360.0, 1000.0, 1040.0),
        "static-tp": summary(800.0, 3000.0, 2790.0),
        "auto": summary(1000.0, 1500.0, 1300.0),
    }
    assert seen.phases_of(summaries) == [QUIET, BURST, WHOLE]


def test_the_better_fixed_layout_is_the_one_with_the_lower_mean() -> None:
    assert [(one.best, one.other) for one in (QUIET, BURST)] == [
        ("static-tp", "static-dp"),
        ("static-dp", "static-tp"),
    ]


def test_auto_is_measured_by_the_better_fixed_layout_of_each_phase() -> None:
    assert [round(one.more, 3) for one in (QUIET, BURST, WHOLE)] == [0.25, 0.5, 0.25]


def test_each_phase_says_what_a_layout_is_good_at() -> None:
    assert list(seen.strengths([QUIET, BURST, WHOLE])) == [
        "quiet: engines together are best; engines apart take 1.7 times as long",
        "burst: engines apart are best; engines together take 3.0 times as long",
    ]


def test_each_switch_says_when_and_why() -> None:
    assert list(seen.decisions(RESULTS, LOG)) == [
        "\nwhat auto did, from 1+1:",
        "  -0.2 s, test request: to 2 by weave, 1 in flight",
        "    because of load: 0.05 requests/s, 0 waiting",
        "  11.3 s, burst: to 1+1 by migrate, 3 in flight",
        "    because of load: 1.45 requests/s, 1 waiting",
    ]


def test_server_without_switches_shows_no_decision() -> None:
    assert list(seen.decisions(RESULTS, replace_switches(LOG))) == [
        "\nwhat auto did, from 1+1:",
        "  nothing",
    ]


def replace_switches(log: SwitchLog) -> SwitchLog:
    """The same without switches."""
    return SwitchLog(log.layout, log.devices_per_engine, ())


def test_the_conclusion_says_that_auto_was_behind_and_by_how_much() -> None:
    text = seen.conclusion([QUIET, BURST, WHOLE], LOG)
    assert "engines apart were faster in 'burst', engines together were faster in 'quiet'." in text
    assert "joined its engines once and parted them once" in text
    assert text.endswith(
        "1.30 s on average, 25% more than with the better fixed layout (engines apart, 1.04 s)."
    )


def test_the_conclusion_says_that_auto_was_ahead() -> None:
    ahead = replace(WHOLE, mean_s={**WHOLE.mean_s, "auto": 0.52})
    assert "0.52 s on average, 50% less than with the better fixed layout" in seen.conclusion(
        [QUIET, BURST, ahead], LOG
    )


@pytest.mark.parametrize("mean_s", [0.01, 12.34, 1234.5])
def test_the_table_fits_the_demos_columns(mean_s: float, tmp_path: Path) -> None:
    long = Seen("quiet again", 240, dict.fromkeys((*seen.FIXED, seen.AUTO), mean_s))
    with (tmp_path / "shown").open("w+") as file:
        Console(width=COLUMNS, file=file).print(seen.table([long]))
        file.seek(0)
        lines = file.read().splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert sum(f"{mean_s:.2f}" in line for line in lines) == 1
    assert not any("…" in line for line in lines)
