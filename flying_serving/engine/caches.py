"""Resets of the prefix caches of an engine's lanes, together."""

from flying_serving.engine.loop import EngineLoop


def reset_prefix_caches(
    loop: EngineLoop, *, reset_running_requests: bool, reset_connector: bool
) -> bool:
    """vLLM's utility, in every lane; lent blocks stay lent. False while requests hold blocks.

    Running requests are reset with their KV, so KV that is retained for a migration or was pulled
    goes too: such requests are prefilled.

    Steps that are ordered run first: vLLM drops what they would give requests that are reset
    meanwhile, and in its own engine no step is under way here.
    """
    leaders, migrations = loop.lanes.leaders.values(), loop.migrations
    if reset_running_requests:
        while (
            any(leader.is_whole and leader.outstanding for leader in leaders)
            or migrations.is_pulling()
        ):
            loop.serve()
        migrations.forget_kv()
    options = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
    lent = sum(len(member.lent.physical()) for member in loop.lanes.members.values())
    return all(
        [loop.lanes.own.forget(lent, **options), *(leader.forget(**options) for leader in leaders)]
    )
