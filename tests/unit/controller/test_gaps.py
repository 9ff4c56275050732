"""TokenGaps: the longest gap since any time is what all tokens together say, from few of them."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.gaps import MOST_GAPS, TokenGaps

STREAMS = ("a", "b", "c")
TOKENS = st.lists(st.tuples(st.sampled_from(STREAMS), st.floats(0, 10), st.booleans()), max_size=40)


@dataclass
class All:
    """Every gap of every stream."""

    last_s: dict[str, float] = field(default_factory=dict)
    gaps: list[tuple[float, float]] = field(default_factory=list)

    def got_token(self, stream: str, now_s: float) -> None:
        if stream in self.last_s:
            self.gaps.append((self.last_s[stream], now_s))
        self.last_s[stream] = now_s

    def worst_since(self, start_s: float) -> float:
        return max(
            (end - max(begin, start_s) for begin, end in self.gaps if end >= start_s), default=0.0
        )


@given(tokens=TOKENS, asked=st.lists(st.floats(0, 400), max_size=5))
def test_the_longest_gap_is_that_of_all_tokens(
    tokens: list[tuple[str, float, bool]], asked: list[float]
) -> None:
    """Whatever streams end in between."""
    kept, every, now_s = TokenGaps(), All(), 0.0
    for stream, after_s, ends in tokens:
        now_s += after_s
        kept.got_token(stream, now_s, watched=True)
        every.got_token(stream, now_s)
        if ends:
            kept.ended(stream)
            every.last_s.pop(stream)
        assert (stream in kept) == (not ends)
    for start_s in asked:
        assert kept.worst_since(start_s) == pytest.approx(every.worst_since(start_s))


def test_unwatched_tokens_are_not_kept() -> None:
    """But where the next gap begins."""
    kept = TokenGaps()
    for number in range(100):
        kept.got_token("a", 100.0 - 1 / (1 + number), watched=False)
    assert len(kept._gaps) == 0
    kept.got_token("a", 102.0, watched=True)
    assert kept.worst_since(0.0) == pytest.approx(2.0 + 1 / 100)


def test_gaps_that_get_ever_shorter_are_bounded() -> None:
    """None counts for less than it is; some for as much as the one before."""
    kept, every, now_s = TokenGaps(), All(), 0.0
    for number in range(10 * MOST_GAPS):
        now_s += 1.0 - number / (11 * MOST_GAPS)
        kept.got_token("a", now_s, watched=True)
        every.got_token("a", now_s)
        assert len(kept._gaps) <= MOST_GAPS
    for part in range(10):
        start_s = now_s * part / 10
        assert (
            every.worst_since(start_s)
            <= kept.worst_since(start_s)
            <= 1.01 * every.worst_since(start_s)
        )
