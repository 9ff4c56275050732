"""The longest times between two tokens of any stream, from any time on until now: a switch's cost
for its streams.
"""

import math

MOST_GAPS = 4096
"""Most gaps that are told apart. Beyond, gaps of about the same length all count as long as the
longest of them.
"""
ALIKE = 1.01
"""Base of a logarithm of gaps: gaps are about the same if its whole part is. No gap is below
`LEAST_S`.
"""
LEAST_S = 1e-6


class TokenGaps:
    """The time of each stream's last token, and the gaps that can still be the longest one since
    some time.

    A gap is dropped when a later one is as long. So the gaps, oldest first, get shorter and
    shorter, and a token costs the same for any number of questions.
    """

    def __init__(self) -> None:
        self._token_at: dict[str, float] = {}
        self._gaps: list[tuple[float, float]] = []  # (when it ended, how long it was)

    def __contains__(self, request_id: str) -> bool:
        """Return whether a stream has got tokens."""
        return request_id in self._token_at

    def got_token(self, request_id: str, now_s: float, *, watched: bool) -> None:
        """Note that a stream got a token; if nothing is `watched`, its gap is not needed."""
        last_s = self._token_at.get(request_id)
        self._token_at[request_id] = now_s
        if not watched or last_s is None:
            return
        gap_s, gaps = now_s - last_s, self._gaps
        while gaps and gaps[-1][1] <= gap_s:
            gaps.pop()
        gaps.append((now_s, gap_s))
        if len(gaps) > MOST_GAPS:
            alike: dict[int, tuple[float, float]] = {}
            for end_s, length_s in gaps:
                kind = int(math.log(max(length_s, LEAST_S) / LEAST_S, ALIKE))
                alike[kind] = (end_s, alike.get(kind, (end_s, length_s))[1])
            self._gaps = list(alike.values())

    def ended(self, request_id: str) -> None:
        """Forget a stream that is over."""
        self._token_at.pop(request_id, None)

    def worst_since(self, start_s: float) -> float:
        """Return the longest gap in seconds since a time; of a gap that had begun before it,
        the part after it.
        """
        return max(
            (min(gap_s, end_s - start_s) for end_s, gap_s in self._gaps if end_s >= start_s),
            default=0.0,
        )
