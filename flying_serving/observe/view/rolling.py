"""Times and tokens of the last seconds, kept only while the live view is open, in a bounded number
of sums.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW_S = 10.0
"""Seconds that latencies are taken over."""
RATE_S = 2.0
"""Seconds that tokens per second are taken over: few, so that a change shows at once."""
BUCKET_S = 0.5
UNWATCHED_S = 10.0
"""Recording stops this long after the last look."""
KEPT_FIRST = 1000
"""The most times to first token that are kept for percentiles, per engine."""


@dataclass
class _Bucket:
    """Sums over `BUCKET_S` from `start_s`. A gap is the time between two outputs of one stream."""

    start_s: float
    tokens: int = 0
    gaps: int = 0
    gap_s: float = 0.0
    worst_gap_s: float = 0.0


class _Engine:
    """The outputs of one engine in the last seconds."""

    def __init__(self) -> None:
        self.kv_usage: float | None = None
        self.buckets: deque[_Bucket] = deque(maxlen=int(WINDOW_S / BUCKET_S) + 1)
        self.first_s: deque[tuple[float, float]] = deque(maxlen=KEPT_FIRST)


class Rolling:
    """Figures of the last seconds, by the engine that sent the output (a group's leader)."""

    def __init__(self, engines: int) -> None:
        self._engines = [_Engine() for _ in range(engines)]
        self._since_s = 0.0
        self._until_s = 0.0

    def look(self, now_s: float) -> None:
        """Note a look: record for some more seconds."""
        if now_s > self._until_s:
            self._engines = [_Engine() for _ in self._engines]
            self._since_s = now_s
        self._until_s = now_s + UNWATCHED_S

    def kv_usage(self, engine: int) -> float | None:
        """Return the share of an engine's KV blocks that requests hold, 0 to 1, by its last report;
        None before that.
        """
        return self._engines[engine].kv_usage

    def note_batch(
        self,
        engine: int,
        kv_usage: float | None,
        tokens: int,
        first_s: Iterable[float],
        gaps_s: Sequence[float],
        now_s: float,
    ) -> None:
        """Note one batch of outputs; nothing while the live view is closed.

        `kv_usage`: as above. `first_s`: times to first token of the streams that began. `gaps_s`:
        times since the last output of each stream that went on.
        """
        if now_s > self._until_s:
            return
        of = self._engines[engine]
        if kv_usage is not None:
            of.kv_usage = kv_usage
        if not tokens:
            return
        if not of.buckets or now_s >= of.buckets[-1].start_s + BUCKET_S:
            of.buckets.append(_Bucket(now_s // BUCKET_S * BUCKET_S))
        bucket = of.buckets[-1]
        bucket.tokens += tokens
        of.first_s.extend((now_s, first) for first in first_s)
        if gaps_s:
            bucket.gaps += len(gaps_s)
            bucket.gap_s += sum(gaps_s)
            bucket.worst_gap_s = max(bucket.worst_gap_s, *gaps_s)

    def figures(self, engines: Iterable[int], now_s: float) -> dict[str, Any]:
        """Return the figures of these engines' streams in the window, in ms and tokens per second;
        None without outputs.

        TTFT is from a request's arrival to its first token. TPOT is the mean time between two
        outputs of a stream, over all streams.
        """
        chosen = [self._engines[engine] for engine in engines]
        since_s = now_s - WINDOW_S
        buckets = [b for of in chosen for b in of.buckets if b.start_s + BUCKET_S > since_s]
        first = sorted(first for of in chosen for at_s, first in of.first_s if at_s >= since_s)
        gaps = sum(bucket.gaps for bucket in buckets)
        from_s = (now_s - RATE_S) // BUCKET_S * BUCKET_S
        recent = sum(bucket.tokens for bucket in buckets if bucket.start_s >= from_s)
        return {
            "ttft_mean_ms": sum(first) / len(first) * 1e3 if first else None,
            "ttft_p90_ms": first[int(0.9 * (len(first) - 1) + 0.5)] * 1e3 if first else None,
            "tpot_mean_ms": sum(bucket.gap_s for bucket in buckets) / gaps * 1e3 if gaps else None,
            "worst_gap_ms": max(bucket.worst_gap_s for bucket in buckets) * 1e3 if gaps else None,
            "tokens_per_s": recent / max(BUCKET_S, now_s - max(from_s, self._since_s)),
        }
