"""Events are the same however the bytes of a stream are cut."""

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.sse import EventStream

EVENTS = [
    {
        "id": "x",
        "choices": [
            {"index": 0, "text": "", "token_ids": [1], "prompt_token_ids": [5, 6], "logprobs": None}
        ],
    },
    {"choices": [{"text": "ü\n\ndata: ", "token_ids": [2, 3], "finish_reason": None}]},
    {
        "choices": [{"text": "!", "token_ids": [], "finish_reason": "length", "stop_reason": None}],
        "usage": None,
    },
    {
        "choices": [],
        "usage": {"completion_tokens": 3, "prompt_tokens": 1},
        "metrics": {"queue_time_ms": 1.5},
    },
]
STREAM = b": ping\n\nevent: x\n" + b"".join(
    f"data: {json.dumps(event)}\n\n".encode() for event in EVENTS
)


@given(
    cuts=st.lists(st.integers(0, len(STREAM)), max_size=20),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_neither_cuts_nor_the_kind_of_line_end_matter(cuts: list[int], line_end: bytes) -> None:
    data = STREAM.replace(b"\n", line_end) + b"data: [DONE]" + line_end * 2
    places = [0, *sorted(cuts), len(data)]
    stream = EventStream()
    events = [e for begin, end in itertools.pairwise(places) for e in stream.feed(data[begin:end])]
    assert stream.done
    assert [[choice.tokens for choice in event.choices] for event in events] == [[1], [2], [0], []]
    assert events[2].choices[0].finish_reason == "length"
    assert events[3].usage is not None and events[3].usage.completion_tokens == 3
    assert events[3].metrics is not None and events[3].metrics.queue_time_ms == 1.5


def test_without_token_ids_a_text_is_one_token() -> None:
    """As vLLM's own bench counts gaps; a chunk without text is none."""
    stream = EventStream()
    texts = [
        b'data: {"choices": [{"text": "%s"}]}\n\n' % text for text in (b"a", b"", b"long text")
    ]
    assert [event.choices[0].tokens for text in texts for event in stream.feed(text)] == [1, 0, 1]
    assert not stream.done


def test_unicode_line_separator_does_not_end_an_event() -> None:
    """Models of random weights write U+0085 and its like."""
    data = (
        'data: {"choices": [{"text": "a\u0085b\u2028", "token_ids": [1, 2], '
        '"finish_reason": null}]}\n\n'
    )
    (event,) = EventStream().feed(data.encode())
    assert event.choices[0].tokens == 2


@pytest.mark.parametrize("error", ['{"message": "no"}', '"no"'])
def test_an_error_is_kept_as_it_is(error: str) -> None:
    """Servers send objects and texts."""
    (event,) = EventStream().feed(f'data: {{"error": {error}}}\n\n'.encode())
    assert event.error == json.loads(error)


@pytest.mark.parametrize(
    "data", [b"data: {\n", b'data: {"choices": 5}\n', b"data: \xff\n", b"data: []\n"]
)
def test_malformed_event_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        list(EventStream().feed(data))
