"""The demo's numbers: hand-made streams with known times, and everything that has to be called wrong."""

from __future__ import annotations

from typing import Any

import pytest

from flying_serving.demo.load import TimedStream, _note
from flying_serving.demo.report import Window, measure, problems
from flying_serving.demo.server import _Display
from flying_serving.testing.sse import Event, EventStream

GROUPS = [[0], [1]]
MAX_TOKENS = 96


def stream(sent_s: float, *arrivals: tuple[float, int], reason: str | None = "length") -> TimedStream:
    """Return a stream that got `arrivals`."""
    return TimedStream(MAX_TOKENS, sent_s, list(arrivals), reason)


def whole(sent_s: float = 0.0) -> TimedStream:
    """Return a stream that got all its tokens at once."""
    return stream(sent_s, (sent_s + 1, MAX_TOKENS))


def record(**changes: Any) -> dict[str, Any]:
    """Return what the server tells of one switch."""
    return {"number": 1, "cutover_ms": 1.0, "drain_ms": 2.0, **changes}


def test_medians_are_of_requests_sent_in_the_window_and_tokens_of_all() -> None:
    """Three events of 1, 2 and 1 tokens: three tokens came after the first event."""
    window = Window(GROUPS, 10.0, 20.0)
    inside = stream(10.0, (10.5, 1), (11.0, 2), (13.5, 1))
    before = stream(5.0, (6.0, 1), (12.0, 1))
    figures = measure([window], [inside, before])
    assert figures.requests == 1
    assert figures.ttft_ms == pytest.approx(500)
    assert figures.tpot_ms == pytest.approx(1000)
    assert figures.tokens_per_s == pytest.approx(5 / 10)


def test_what_was_not_measured_is_none() -> None:
    """No request in the window, and a request without a token, are not zeros."""
    window = Window(GROUPS, 0.0, 1.0)
    assert (measure([window], []).ttft_ms, measure([window], []).tpot_ms) == (None, None)
    assert measure([window], [stream(0.5)]).ttft_ms is None


def test_windows_of_one_layout_are_added() -> None:
    """A stream counts in the window in which it was sent; its later tokens count where they come."""
    windows = [Window(GROUPS, 0.0, 2.0), Window(GROUPS, 4.0, 8.0)]
    figures = measure(windows, [stream(1.0, (1.5, 1), (3.0, 1), (5.0, 1))])
    assert (figures.seconds, figures.requests, figures.tokens_per_s) == (6.0, 1, 2 / 6)


def test_nothing_wrong() -> None:
    """All tokens, all switches."""
    assert problems([whole()], [record()], 1) == []


@pytest.mark.parametrize(
    ("streams", "records", "word"),
    [
        ([], [record()], "no request"),
        ([stream(0, (1, MAX_TOKENS - 1))], [record()], "truncated"),
        ([stream(0, (1, MAX_TOKENS), reason="stop")], [record()], "truncated"),
        ([stream(0, (1, MAX_TOKENS), reason=None)], [record()], "truncated"),
        ([TimedStream(MAX_TOKENS, 0.0, error="ReadError: gone")], [record()], "gone"),
        ([whole()], [], "0 switches recorded, 1 made"),
        ([whole()], [record(drain_ms=None)], "no drain_ms"),
        ([whole()], [record(cutover_ms=None)], "no cutover_ms"),
    ],
)
def test_each_kind_of_wrong(streams: list[TimedStream], records: list[dict[str, Any]], word: str) -> None:
    """One line each."""
    (line,) = problems(streams, records, 1)
    assert word in line


def test_an_error_inside_a_stream_is_noted() -> None:
    """A server may fail after it has answered 200."""
    broken = TimedStream(MAX_TOKENS, 0.0)
    _note(broken, Event(error={"message": "lost"}), 1.0)
    assert broken.problem is not None


def test_what_ends_a_line_of_text_ends_no_event() -> None:
    """Models of random weights write U+0085 and its like."""
    data = 'data: {"choices": [{"text": "a\u0085b\u2028", "token_ids": [1, 2], "finish_reason": null}]}\n\n'
    got = TimedStream(MAX_TOKENS, 0.0)
    for event in EventStream().feed(data.encode()):
        _note(got, event, 1.0)
    assert got.arrivals == [(1.0, 2)]


def test_the_display_follows_the_log() -> None:
    """Phases come from log lines; other lines change nothing."""
    display = _Display(2)
    display.read(
        "Triton is installed\n"
        "(APIServer pid=7) INFO 11-21 02:14:41 [api_utils.py:286] non-default args: {}\n"
        "(EngineCore_DP1 pid=8) INFO 11-21 02:14:45 [progress.py:13] engine 1: loading the model\n"
        "(EngineCore_DP0 pid=9) INFO 11-21 02:14:48 [core.py:402] init engine (profile) took 0.27 s\n"
        "(EngineCore_DP7 pid=9) INFO 11-21 02:14:48 [progress.py:13] engine 7: there is none\n"
    )
    assert display._phases == {
        "API server": "waiting for the engines",
        "engine 0": "ready",
        "engine 1": "loading the model",
    }
