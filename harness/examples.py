"""How many examples property tests try: few in `make test`, all in `make test-deep`."""

import os

ALL_EXAMPLES = "FLYING_TEST_EXAMPLES"
"""A variable: `all`, or not set."""
ALL = "all"
SHARE = 20
"""`make test` tries one of this number."""
LEAST = 5


def examples(most: int) -> int:
    """Return the number of examples to try, of `most`. Raises ValueError for another value of the
    variable than `all`.
    """
    chosen = os.environ.get(ALL_EXAMPLES, "")
    if chosen not in ("", ALL):
        raise ValueError(f"{ALL_EXAMPLES}={chosen}: must be {ALL}, or not set")
    return most if chosen else min(most, max(LEAST, most // SHARE))
