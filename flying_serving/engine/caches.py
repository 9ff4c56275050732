"""Resets of the prefix caches of an engine's lanes, together."""

import time

from flying_serving.engine.group_steps import NOTES_POLL_S
from flying_serving.engine.loop import EngineLoop

RESET_WAIT_S = 20.0
"""Seconds that a reset waits for planned steps and for members that pull."""


def reset_prefix_caches(
    loop: EngineLoop, *, reset_running_requests: bool, reset_connector: bool
) -> bool:
    """Reset the prefix cache of every lane, as vLLM's utility does. Return False while requests
    hold blocks, or if a member does not answer in time: it may be lost, and the API server's notice
    of that waits until the utility has ended.

    Lent blocks stay lent. Running requests are reset with their KV. KV that is retained for a
    migration or was pulled goes too, and such requests are prefilled.

    Ordered steps run first: vLLM drops the output of requests that are reset meanwhile. In vLLM's
    own engine no step is under way here.
    """
    leaders, migrations = loop.lanes.leaders.values(), loop.migrations
    if reset_running_requests:
        until_s = loop.clock() + RESET_WAIT_S
        while (
            any(leader.is_whole and leader.is_stepping for leader in leaders)
            or migrations.is_pulling()
        ):
            if loop.group_steps.take_outputs():
                continue
            if loop.has_message() and not loop.group_steps.waits_for_notes():
                loop.serve()
            elif loop.clock() > until_s:
                return False
            else:
                time.sleep(NOTES_POLL_S)
        migrations.forget_kv()
    options = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
    lent = sum(len(member.lent.physical()) for member in loop.lanes.members.values())
    return all(
        [
            loop.lanes.own_pool.reset_prefix_cache(lent, **options),
            *(leader.reset_prefix_cache(**options) for leader in leaders),
        ]
    )
