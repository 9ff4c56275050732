"""The regular expression that reads a client's bytes takes a time that grows with their number, and
not with its square.
"""

import time

import pytest

from flying_serving.server.http import overload

SIZES = (1 << 14, 1 << 15, 1 << 16)
MOST_S = 1.0
"""Processor time for the largest. In linear time it is below a hundredth of that; with the square
of the length it was above four seconds.
"""
HOSTILE = {
    "spaces after a colon": (b'"priority":', b" ", b"0"),
    "spaces before a colon": (b'"priority"', b" ", b"0"),
    "spaces after a quote": (b'"priority":"', b" ", b"0"),
    "names": (b"", b'"priority" ', b""),
    "names with a colon": (b"", b'"priority": ', b""),
    "quotes": (b"", b'"', b""),
    "backslashes": (b'"', b"\\", b""),
    "an open text": (b'"', b"a", b""),
}


@pytest.mark.parametrize(("head", "unit", "tail"), HOSTILE.values(), ids=HOSTILE)
def test_time_does_not_grow_with_the_square_of_the_length(
    head: bytes, unit: bytes, tail: bytes
) -> None:
    for size in SIZES:
        body = head + unit * (size // len(unit)) + tail
        began_s = time.process_time()
        overload._URGENT.sub(b"", body)
        assert time.process_time() - began_s < MOST_S, size


@pytest.mark.parametrize(
    ("body", "urgent"),
    [
        (b'{"priority":-1}', True),
        (b'{"priority" :\t\n -1}', True),
        (b'{"priority": "-1"}', True),
        (b'{"priority": " \t-1"}', True),
        (b'{"priority":1}', False),
        (b'{"priority": "1"}', False),
        (b'{"priority"-1}', False),
        (b'{"priority":"a-1"}', False),
    ],
)
def test_a_priority_below_zero_is_found(body: bytes, urgent: bool) -> None:
    assert bool(overload._URGENT.search(body)) is urgent
