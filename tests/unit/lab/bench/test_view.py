"""What `bench` shows fits a terminal of 80 columns."""

import io
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console, RenderableType

from flying_lab.bench import compare, view

COLUMNS = 80
VALUES = (0.001, 1.23456, 23.456, 1673.456, 9999.4)


def lines(shown: RenderableType) -> list[str]:
    """As a terminal shows it."""
    file = io.StringIO()
    Console(width=COLUMNS, file=file).print(shown)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("value", VALUES)
def test_a_comparison_is_shown_whole(value: float) -> None:
    keys = [key for _, key in compare.COLUMNS]
    summary: Mapping[str, Any] = {
        **dict.fromkeys(keys, value),
        "completed": 1000,
        "num_prompts": 1000,
    }
    shown = lines(view.systems("times in ms", compare.COLUMNS, {"static-dp": summary}))
    (row,) = [line for line in shown if "static-dp" in line]
    assert row.split() == ["static-dp", "1000/1000", *[view.number(value)] * len(keys)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (3, "3"),
        (0.5, "0.50"),
        (12.345, "12.35"),
        (123.45, "123.5"),
        (999.96, "1000"),
        (1673.456, "1673"),
    ],
)
def test_numbers_have_the_fewest_digits(value: float | None, text: str) -> None:
    assert view.number(value) == text


def behind(send_ms: float, loop_ms: float) -> dict[str, Any]:
    """The summary of a client that fell behind."""
    return {"client_behind": True, "p99_send_lag_ms": send_ms, "p99_loop_lag_ms": loop_ms}


def test_a_client_that_kept_up_is_not_told() -> None:
    assert view.lag_warning([{"client_behind": False}]) is None


def test_a_client_that_fell_behind_in_several_replays_is_told_once() -> None:
    told = view.lag_warning([behind(6.0, 9.0), {"client_behind": False}, behind(8.0, 7.0)])
    assert told is not None
    assert (
        "in 2 of 3 replays: at the 99th percentile it was 8.0 ms late in sending and 9.0 ms late "
        "in reading" in told
    )
