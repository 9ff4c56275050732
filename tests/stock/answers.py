"""The answers of stock vLLM that servers are compared with: recorded ones, or those of this GPU."""

import json
from functools import cache
from typing import Any

from harness.place import Place, place
from tests.stock.record import FOLDER, record

DEGREES = (1, 2, 4, 8)


def stock_answers(shape: str) -> dict[str, Any]:
    """Return what stock vLLM answers, in float32, by degree; each has "answers", by request.

    On one GPU stock runs there, at degree 1: other degrees need more GPUs, and a device draws other
    random numbers than the CPU, where the recordings are of. In float32 degrees differ by less than
    tests notice.
    """
    if place() is Place.ONE_GPU:
        return {str(degree): _of_this_gpu(shape) for degree in DEGREES}
    degrees: dict[str, Any] = json.loads((FOLDER / f"{shape}.json").read_text())["degrees"]
    return degrees


@cache
def _of_this_gpu(shape: str) -> dict[str, Any]:
    return record(shape, 1)
