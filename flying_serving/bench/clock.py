"""Two clocks read as one: the one that times requests, and the one on the wall, which logs of servers go by."""

import time

SAMPLES = 5


def together() -> tuple[float, float]:
    """(time.perf_counter(), time.time()) of the same moment.

    Between two readings a process may wait for a processor, on a busy machine for longer than a token takes: of a few
    pairs of readings the closest one counts.
    """
    closest_s, found = float("inf"), (0.0, 0.0)
    for _ in range(SAMPLES):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        if after - before < closest_s:
            closest_s, found = after - before, ((before + after) / 2, wall)
    return found
