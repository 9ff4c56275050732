"""The live view in a terminal: what it draws."""

from typing import Any

import pytest
from rich.console import Console

from flying_serving.cli.live_view import duration, room, top
from flying_serving.server.engine_record import Loss
from tests.unit.server.figures.states import look, losses_of, switched


def drawn(found: dict[str, Any], width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(top(found))
    return captured.get()


def test_screen_shows_groups_pool_switches_and_costs(shown: dict[str, Any]) -> None:
    """Groups with their degree, what stands aside, the pool, times, switches with reason and
    costs.
    """
    text = drawn(shown)
    assert "policy manual, layout 2+1+1" in text
    assert text.count("TP 1 ─") == 2 and text.count("TP 2 ─") == 1
    assert "0  KV 25%" in text and "1  KV –" in text
    assert "1 requests at TP 1 on engine 0, paused" in text
    assert (
        f"{shown['pool']['requests']} wait (oldest {duration(shown['pool']['oldest_s'] * 1e3)}, "
        "0 urgent)" in text
    )
    assert "TTFT 500 ms (P90 500 ms), TPOT 100 ms (longest gap 100 ms)" in text
    assert "1+1+1+1" in text and "2+1+1" in text
    assert "ordered by an operator" in text and "2.00 ms" in text and "under way" in text


def test_a_lost_engine_is_named_with_since_when_and_why(shown: dict[str, Any]) -> None:
    """Above the groups of the others. Reasons are no markup."""
    assert "degraded" not in drawn(shown)
    losses = losses_of(4)
    controller, rolling = switched()
    losses.lost(3, Loss(0.0, "[red]killed"), controller.state.layout, frozen=False)
    losses.not_started(3, "not ready")
    controller.engines_lost([3], 8.0)
    text = drawn(look(controller, rolling, 9.0, {}, losses) | {"time": 65.0})
    assert (
        "degraded: engine 3 is lost: [red]killed (2 losses so far); last start: not ready, 1 min "
        "ago" in text
    )
    assert text.count("TP 1 ─") == 1 and text.count("TP 2 ─") == 1


def test_lent_weights_are_shown_where_there_are_any(shown: dict[str, Any]) -> None:
    """In the box of their group, once each of its engines may have said so."""
    assert "lent" not in drawn(shown)
    for engine, lent_bytes in enumerate((7 << 19, 0)):
        memory = {"weight_bytes": 9 << 20, "kv_bytes": 1 << 20, "lent_bytes": lent_bytes}
        shown["engines"][engine]["memory"] = memory
    text = drawn(shown)
    assert "3.5 MiB lent" in text and "0 B lent" in text and text.count("lent") == 2


def test_a_split_request_is_one_bar_of_two_groups(shown: dict[str, Any]) -> None:
    """As long as all of it; there is no line about splits before the first one."""
    assert "shared" not in drawn(shown)
    split = {"first": [0, 1], "second": [3], "at": 600, "rest": 200}
    text = drawn(shown | {"splits": {"now": 1, "begun": 7, "undone": 0, "shown": [split]}})
    assert "1 requests are shared by two groups, 7 so far" in text
    assert f"engines 0, 1: 600 tokens {'━' * 24} engine 3: 200" in text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1020 B"),
        (1024, "1 KiB"),
        (1010 << 20, "1010 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_bytes_have_three_digits_and_the_largest_unit(size_bytes: int, text: str) -> None:
    assert room(size_bytes) == text


@pytest.mark.parametrize("width", [40, 80, 300])
def test_no_line_is_wider_than_the_terminal(shown: dict[str, Any], width: int) -> None:
    assert max(map(len, drawn(shown, width).splitlines())) <= width


def test_a_failed_switch_and_a_gain_without_limit(shown: dict[str, Any]) -> None:
    """Names from outside are no markup."""
    failed = {"problem": "engine 1 [red]did not answer", "predicted_cost_request_s": 1.25}
    shown["switches"].append(shown["switches"][0] | failed)
    text = drawn(shown | {"model": "[bold]x"}, 200)
    assert "failed: engine 1 [red]did not answer" in text
    assert "∞" in text and "1.25" in text
    assert "[bold]x" in text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "–"), (0.123, "0.12 ms"), (12.34, "12.3 ms"), (999.6, "1.00 s"), (123_456.0, "123 s")],
)
def test_durations(ms: float | None, text: str) -> None:
    assert duration(ms) == text
