"""Groups whose steps are tensor parallel and token parallel in turn, whichever is shorter, so that
requests have KV of both.
"""

from itertools import cycle
from math import inf

from flying_serving.parallelism import Parallelism

PREAMBLE = "from harness.both_ways import take_turns; take_turns()"
"""Of a server whose groups step so."""
COMMAND = ("harness.both_ways", "serve")
"""Of such a server that is a process of its own."""


def take_turns() -> None:
    """Let the groups of servers that this process starts divide tokens in every second step that
    has two for each engine, if their lanes have such steps. Small ones are measured too.
    """
    from flying_serving.predict import probes
    from flying_serving.predict.parallelism import ParallelismChoice

    probes._DIVIDED = 1

    turns, measured = cycle(Parallelism), ParallelismChoice.least_tokens

    def least_tokens(self: ParallelismChoice, size: int) -> float:
        return 2 * size if measured(self, size) < inf else inf

    def choose(_self: ParallelismChoice, _size: int, *_contents: int) -> Parallelism:
        return next(turns)

    ParallelismChoice.least_tokens = least_tokens  # type: ignore[method-assign]
    ParallelismChoice.choose = choose  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    from flying_serving.cli.main import main

    take_turns()
    main()
