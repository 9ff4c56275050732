"""Where n-grams of a request's tokens have been first: one look at all tokens, in place of a search
for each step.
"""

from typing import Any

import numpy as np


class FirstPlaces:
    """The first place of each n-gram of `tokens`, for n from `least` to `most`.

    A search through all tokens before each step that a request has made would take a time that
    grows with the square of its outputs.
    """

    def __init__(self, tokens: np.ndarray[Any, Any], least: int, most: int) -> None:
        self._least, self._most = least, most
        self._first: dict[int, np.ndarray[Any, Any]] = {}
        """By n: for each place, the first one of the n-gram that begins there."""
        letters = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
        count = len(letters) + 1
        grams = letters
        for size in range(1, most + 1):
            if size > 1:  # a gram and the letter behind it
                grams = grams[:-1] * count + letters[size - 1 :]
            _, first, grams = np.unique(grams, return_index=True, return_inverse=True)
            if size >= least:
                self._first[size] = first[grams]

    def behind(self, end: int) -> int | None:
        """Return the place behind the first occurrence of the longest n-gram with which the first
        `end` tokens end; None if none of their last n-grams has been before.
        """
        for size in range(min(self._most, end - 1), self._least - 1, -1):
            first = int(self._first[size][end - size])
            if first < end - size:
                return first + size
        return None
