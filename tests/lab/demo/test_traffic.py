"""What the demo's second part shows of results, and what it takes for wrong."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flying_lab.bench.compare import Compared
from flying_lab.bench.replay import SWITCHES, Replayed
from flying_lab.demo import layouts, traffic
from flying_lab.demo.__main__ import COLUMNS, others_note
from flying_lab.demo.server import layout_of
from flying_lab.results.metrics import summarise
from flying_lab.results.record import Record
from flying_lab.results.results import Results, Run
from flying_lab.workload.model import Request
from tests.placement.machines import machine

TOOK_S = {"static-dp": (1.3, 1.1), "static-tp": (0.8, 3.0), "auto": (0.9, 1.2)}
"""Of a request in the quiet phase and in the burst."""
SWITCH = {
    "number": 1,
    "time": 1003.0,
    "from": [[0], [1]],
    "to": [[0, 1]],
    "mode": "weave",
    "problem": None,
}
SWITCH |= {"reason": "load: 0.05 requests/s, 0 waiting", "requests_in_flight": 1}


def replayed(quiet_s: float, burst_s: float) -> Replayed:
    """One request in each phase."""
    records = []
    for number, (phase, took_s) in enumerate((("quiet", quiet_s), ("burst", burst_s))):
        one = Record(Request(number, 5.0 * number, 8, 2, phase=phase), "ok", None, 5.0 * number)
        one.end_s = 5.0 * number + took_s
        one.token_s.extend([one.end_s - 0.1, one.end_s])
        one.token_counts.extend([1, 1])
        records.append(one)
    results = Results.of(Run("demo", "", 1, "http://there", "m", 1000.0, 10.0), records)
    return Replayed(results, summarise(results, None))


def told(tmp_path: Path, switches: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """What is shown of three servers, and what is wrong."""
    (tmp_path / "auto").mkdir()
    log = {"layout": [[0], [1]], "devices_per_engine": 1, "switches": switches}
    (tmp_path / "auto" / SWITCHES).write_text(json.dumps(log))
    compared = Compared({name: replayed(*took_s) for name, took_s in TOOK_S.items()}, 0)
    shown = io.StringIO()
    wrong = traffic._tell(Console(width=COLUMNS, file=shown), compared, tmp_path)
    return shown.getvalue(), wrong


def test_a_server_that_has_switched_is_all_right(tmp_path: Path) -> None:
    _, wrong = told(tmp_path, [SWITCH])
    assert wrong == []


def test_a_server_that_has_not_switched_is_wrong(tmp_path: Path) -> None:
    _, wrong = told(tmp_path, [])
    assert wrong == ["auto has not changed the layout once"]


@pytest.mark.parametrize("switches", [[], [SWITCH], [SWITCH] * 3])
def test_printed_text_fits_the_columns(tmp_path: Path, switches: list[dict[str, Any]]) -> None:
    text, _ = told(tmp_path, switches)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "…" not in text


def test_printed_text_ends_with_the_distance_of_auto(tmp_path: Path) -> None:
    text, _ = told(tmp_path, [SWITCH])
    assert " ".join(text.split()).endswith(
        "12% less than with the better fixed layout (engines apart, 1.20 s)."
    )


RECORDS = [
    {
        "from": layout_of(1),
        "to": layout_of(2),
        "mode": mode,
        "requests_in_flight": 3,
        "drain_ms": 900.0,
    }
    | {"cutover_ms": cutover_ms, "worst_token_gap_ms": gap_ms}
    for mode, cutover_ms, gap_ms in (("weave", 15.2, 119.8), ("hard", 14.9, 1050.6))
]


def test_the_switches_of_an_operator_fit_the_columns() -> None:
    shown = io.StringIO()
    Console(width=COLUMNS, file=shown).print(layouts.switch_table(RECORDS))
    assert max(map(len, shown.getvalue().splitlines())) <= COLUMNS
    assert "…" not in shown.getvalue()


def test_first_part_ends_with_the_effect_of_switches_on_streams() -> None:
    text = layouts.conclusion(RECORDS)
    assert "the layout changed 2 times while requests streamed, each time within 15 ms" in text
    assert text.endswith(
        "No stream stood still for longer than 0.12 s with mode weave, 1.05 s with mode hard."
    )


@pytest.mark.parametrize(
    ("percents", "cores", "used"),
    [([50.0, 50.0], 2, "1.0 of 2 CPUs"), ([20.0] * 8, 8, "1.6 of 8 CPUs")],
)
def test_other_programs_that_are_at_work_are_told(
    percents: list[float], cores: int, used: str
) -> None:
    assert used in (others_note(percents, machine(cores)) or "")


def test_other_programs_on_cpus_that_the_demo_may_not_use_are_not_told() -> None:
    assert others_note([5.0, 5.0, 100.0, 100.0], machine(2)) is None


def test_a_quiet_machine_is_not_worth_a_note() -> None:
    assert others_note([5.0, 5.0], machine(2)) is None
