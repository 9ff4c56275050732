"""Figures of streams on slowed devices, and the verdict over the better of the other systems."""

import pytest

from benchmarks.client import Stream
from benchmarks.live_report import WHOLE
from benchmarks.splits_report import TOKENS, figures, in_devices_time, ratios, span_s, table

STREAMS = [Stream(1.0, [1.5, 1.55, 1.75]), Stream(2.0, [2.5, 2.58, 2.65, 2.7])]


def kept(**of_systems: list[float]) -> dict[str, object]:
    """Return rows in which systems have these tokens/s, one for each round."""
    return {
        "rows": [
            {"system": name, "phase": phase, "figure": TOKENS, "values": values}
            for name, values in of_systems.items()
            for phase in ("long prompts", WHOLE)
        ]
    }


def test_tokens_count_if_their_gap_is_within_the_target() -> None:
    """First tokens have none."""
    assert span_s(STREAMS) == pytest.approx(1.7)
    found = figures(STREAMS, 1.7)
    assert found[TOKENS] == pytest.approx((2 + 4) / 1.7)
    assert found["within %"] == pytest.approx(80.0)
    assert found["mean TTFT ms"] == pytest.approx(500.0)
    assert found["mean E2E ms"] == pytest.approx((750 + 700) / 2)


def test_times_are_those_of_the_devices() -> None:
    slowed = [Stream(2 * one.sent_s, [2 * at_s for at_s in one.token_s]) for one in STREAMS]
    there = [in_devices_time(one, 2.0) for one in slowed]
    assert figures(there, span_s(there)) == pytest.approx(figures(STREAMS, span_s(STREAMS)))


@pytest.mark.parametrize(("ours", "verdict"), [([105.0, 120.0], "pays"), ([104.0], "does not pay")])
def test_the_verdict_is_that_of_the_better_of_the_others(ours: list[float], verdict: str) -> None:
    rounds = len(ours)
    rows = kept(split=ours, auto=[100.0] * rounds, **{"static-dp": [90.0] * rounds})
    found = {("split", WHOLE, TOKENS): ours}
    found |= {(name, WHOLE, TOKENS): [value] * rounds for name, value in (("a", 1.0), ("b", 2.0))}
    assert ratios(found) == [value / 2.0 for value in ours]
    lines = table(rows).splitlines()
    assert len(lines) == 2 + 2 * 3 + 2
    assert lines[-1].endswith(f"it {verdict}.")
