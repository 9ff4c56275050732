"""Figures of the last seconds against all that was put in."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.observe.view.rolling import (
    BUCKET_S,
    KEPT_FIRST,
    RATE_S,
    UNWATCHED_S,
    WINDOW_S,
    Rolling,
)

NOTHING = {
    "ttft_mean_ms": None,
    "ttft_p90_ms": None,
    "tpot_mean_ms": None,
    "worst_gap_ms": None,
    "tokens_per_s": 0.0,
}


@dataclass(frozen=True)
class Batch:
    """What taken at once from one engine."""

    after_s: float
    engine: int
    first_s: list[float]
    gaps_s: list[float]


seconds = st.floats(0.001, 5.0)
batches = st.lists(
    st.builds(
        Batch,
        st.floats(0.0, 3.0),
        st.integers(0, 1),
        st.lists(seconds, max_size=3),
        st.lists(seconds, max_size=5),
    )
)


@given(batches)
def test_figures_are_those_of_the_window(given_batches: list[Batch]) -> None:
    """First tokens exactly; gaps and tokens to a bucket, whose begin is a multiple of its
    length.
    """
    rolling, now_s, taken = Rolling(2), 100.0, []
    rolling.look(now_s)
    for batch in given_batches:
        now_s += batch.after_s
        rolling.look(now_s)
        tokens = len(batch.first_s) + len(batch.gaps_s)
        rolling.note_batch(batch.engine, 0.5, tokens, batch.first_s, batch.gaps_s, now_s)
        taken.append((now_s, batch))
    for engines in ((0,), (1,), (0, 1)):
        figures = rolling.figures(engines, now_s)
        mine = [(at_s, batch) for at_s, batch in taken if batch.engine in engines]
        first = [f for at_s, batch in mine if at_s >= now_s - WINDOW_S for f in batch.first_s]
        since_s = (now_s - WINDOW_S) // BUCKET_S * BUCKET_S
        gaps = [gap for at_s, batch in mine if at_s >= since_s for gap in batch.gaps_s]
        from_s = (now_s - RATE_S) // BUCKET_S * BUCKET_S
        tokens = sum(len(b.first_s) + len(b.gaps_s) for at_s, b in mine if at_s >= from_s)
        assert figures["ttft_mean_ms"] == (
            pytest.approx(sum(first) / len(first) * 1e3) if first else None
        )
        assert (figures["ttft_p90_ms"] is None) == (not first)
        assert figures["tpot_mean_ms"] == (
            pytest.approx(sum(gaps) / len(gaps) * 1e3) if gaps else None
        )
        assert figures["worst_gap_ms"] == (pytest.approx(max(gaps) * 1e3) if gaps else None)
        watched_s = max(BUCKET_S, now_s - max(from_s, 100.0))
        assert figures["tokens_per_s"] == pytest.approx(tokens / watched_s)


def test_tokens_are_not_noted_without_a_viewer() -> None:
    """Neither before the first look nor long after the last; and what is old is forgotten at the
    next.
    """
    rolling = Rolling(1)
    rolling.note_batch(0, 0.5, 3, [0.1], [0.2], 5.0)
    assert rolling.kv_usage(0) is None
    rolling.look(10.0)
    rolling.note_batch(0, 0.5, 3, [0.1], [0.2], 11.0)
    assert rolling.kv_usage(0) == 0.5
    rolling.note_batch(0, 0.9, 3, [0.1], [0.2], 10.0 + UNWATCHED_S + 0.1)
    assert rolling.kv_usage(0) == 0.5
    rolling.look(10.0 + UNWATCHED_S + 1.0)
    assert rolling.kv_usage(0) is None
    assert rolling.figures([0], 10.0 + UNWATCHED_S + 1.0) == NOTHING


def test_kept_figures_are_bounded() -> None:
    """However many tokens come in however long a time."""
    rolling = Rolling(1)
    for i in range(20_000):
        rolling.look(i * 0.01)
        rolling.note_batch(0, None, 2, [0.5], [0.02], i * 0.01)
    engine = rolling._engines[0]
    assert len(engine.first_s) <= KEPT_FIRST
    assert len(engine.buckets) <= WINDOW_S / BUCKET_S + 1
    figures = rolling.figures([0], 199.99)
    assert figures["tokens_per_s"] == pytest.approx(200, rel=0.01)
    assert figures["tpot_mean_ms"] == pytest.approx(20)


def test_one_in_ten_is_longer_than_the_90th_percentile() -> None:
    rolling = Rolling(1)
    rolling.look(1.0)
    rolling.note_batch(0, None, 11, [i / 10 for i in range(11)], [], 1.0)
    assert rolling.figures([0], 1.0)["ttft_p90_ms"] == pytest.approx(900)
