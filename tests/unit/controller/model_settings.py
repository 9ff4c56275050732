"""Settings of a small server, and an engine's answer to a switch."""

from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.work import Objective
from flying_serving.wire import SwitchAnswer

ANSWER = SwitchAnswer(1.0, 1.0, 0.1)
TOKENS = {1: 100, 2: 200, 4: 400}


def settings(
    policy: str = "auto",
    engines: int = 4,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    capped: bool = True,
    most_waiting: int = 1000,
    dry_run: bool = False,
    lends: bool = False,
    spare: bool = False,
) -> Settings:
    """Return settings of a small server: an engine holds 100 tokens, a group as many for each of
    its engines.

    With `lends` the widest group holds 75 more for each while it lends its weights. With `spare` a
    fixed layout has engines alone too, while one is lost.
    """
    sizes = [size for size in TOKENS if size <= engines]
    pinned, spares = POLICIES[policy].pinned_size, frozenset[int]()
    if pinned is not None:
        fixed, capped = pinned(sizes), POLICIES[policy].splits
        spares = frozenset({1} - {fixed} if spare else ())
        sizes = [*spares, fixed]
    return Settings(
        engines,
        Capacity(
            {size: TOKENS[size] for size in sizes}, 1, {}, 175 * max(sizes) if lends else 0, spares
        ),
        POLICIES[policy],
        Limits(max_num_seqs, max_num_batched_tokens, capped),
        Objective(10.0),
        most_waiting=most_waiting,
        dry_run=dry_run,
    )
