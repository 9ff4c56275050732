"""What test_order.py runs in processes of their own; imports nothing heavy, so that they start at
once.
"""

import fcntl
import json
import random
import sys
import time

from flying_serving.comm.order import SequenceNumbers

NESTED = ((0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3))


def say(what: object) -> None:
    """Send one line of JSON to the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def take(
    order: SequenceNumbers, chance: random.Random, nested: bool
) -> tuple[list[int], list[int]]:
    """Take numbers for random members."""
    members = (
        list(chance.choice(NESTED)) if nested else chance.sample(range(4), chance.randint(1, 4))
    )
    return members, order.take(0, members)


def main(path: str, what: str, seed: str) -> None:
    """Take numbers, 50 for each line that comes in; take the lock and keep it; or be engine 3."""
    order = SequenceNumbers(path, 4)
    if what == "hold":
        order.take(0, [0, 1])
        fcntl.flock(order.file, fcntl.LOCK_EX)
        say("held")
        time.sleep(600)
    if what == "join":
        order.join(3)
        say("joined")
        time.sleep(600)
    chance = random.Random(int(seed))
    say("ready")
    for _ in sys.stdin:
        say([take(order, chance, what == "nested") for _ in range(50)])


if __name__ == "__main__":
    main(*sys.argv[1:])
