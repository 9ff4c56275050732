"""The answers of stock vLLM that servers are compared with: recorded ones, or those of this GPU."""

from functools import cache
from typing import Any

from harness.place import Place, place
from tests.stock.record import DEGREES, Answers, record, recorded


def answers_of(recording: str, degree: int) -> Answers:
    """Return what stock vLLM answers at a degree, by the name of the request.

    On one GPU stock runs there, at degree 1: other degrees need more GPUs, and a device draws other
    random numbers than the CPU, where the recordings are of. In float32 degrees differ by less than
    tests notice.

    Raises ValueError if something else was recorded: see `recorded`.
    """
    if place() is Place.ONE_GPU:
        return _of_this_gpu(recording)
    return recorded(recording, degree)


def stock_answers(shape: str) -> dict[str, Any]:
    """Return all answers of a recording by degree; each has "answers", by request."""
    return {str(degree): {"answers": answers_of(shape, degree)} for degree in DEGREES[shape]}


@cache
def _of_this_gpu(recording: str) -> Answers:
    return dict(record(recording, 1)["answers"])
