"""What is sent, and how cases are drawn: the same ones for the same seed."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

JSON = "application/json"
T = TypeVar("T")
_DRAW = settings(
    max_examples=400,
    phases=[Phase.generate],
    database=None,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
MOST_VAIN = 20
"""Seeds in a row that bring nothing new: there are no more cases."""


@dataclass(frozen=True)
class Sent:
    """One request: its path, its body and the content type that it claims, its method, and other
    headers.
    """

    path: str
    content: bytes
    content_type: str = JSON
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


def draw(strategy: st.SearchStrategy[T], count: int, first_seed: int) -> list[T]:
    """That many different cases, which can be hashed, or as many as there are."""
    drawn: dict[T, None] = {}
    vain = 0
    for number in itertools.count(first_seed):
        if len(drawn) >= count or vain >= MOST_VAIN:
            break
        before = len(drawn)

        @seed(number)
        @_DRAW
        @given(strategy)
        def collect(case: T) -> None:
            drawn[case] = None

        collect()
        vain = vain + 1 if len(drawn) == before else 0
    return list(drawn)[:count]


_PIECES = (
    b"\n",
    b",",
    b"0",
    b"9",
    b"-",
    b".",
    b"}",
    b"]",
    b'"',
    b"\\",
    b"1e9",
    b"\0",
    b"\xff",
    b"null",
    b"NaN",
    b"[" * 500,
)


def damaged(content: bytes, count: int, number: int) -> Iterator[bytes]:
    """Yield that many copies, each with some bytes dropped, put twice, or replaced. Drawing as many
    would take long.
    """
    dice = random.Random(number)
    for _ in range(count):
        at = dice.randint(0, len(content))
        end = min(len(content), at + dice.choice((0, 0, 1, 1, 2, 5, 20)))
        piece = dice.choice(
            (
                b"",
                content[at:end] * 2,
                dice.choice(_PIECES),
                dice.choice(_PIECES),
                dice.randbytes(1),
            )
        )
        yield content[:at] + piece + content[end:]
