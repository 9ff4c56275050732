"""Ray Serve: each replica of one deployment has a node, and Ray's HTTP proxy is the router between
them.

    serve run flying_deploy.ray:app model=PATH nodes=2 engines=2

`RayArgs` has all arguments. A replica and its node live and die together: a replica is made when
its node is ready, and ends when its node does. No other module of the package imports Ray.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from flying_deploy.own_node import END_S, OwnNode
from flying_deploy.passing import PassingOn
from flying_deploy.ray_args import RayArgs, parse_args
from flying_deploy.scaling import LOAD, by_load
from flying_serving.errors import NotInstalled

try:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
except ImportError:
    raise NotInstalled('Ray Serve is not installed: pip install "flying-serving[ray]"') from None

NAME = "Node"
HEALTH_PERIOD_S = 1.0
"""Seconds between two checks of a replica, so the longest time until one that has ended is
replaced.
"""
HEALTH_TIMEOUT_S = 30.0
"""Seconds in which a node has to answer. After three timeouts in a row it is replaced."""
LEAVE_S = 0.1
"""The time for answers that are on their way when a node has ended."""
MAX_ONGOING = 1_000_000
"""Requests per replica, for Ray: the node has bounds of its own, and answers with 429."""
logger = logging.getLogger("ray.serve")


@serve.ingress()
class Replica:
    """The replica of a node: starts it, passes requests on to it, and says how busy it is."""

    async def __init__(self, args: RayArgs) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the node. Raises ServerFailed if it ends before it is ready."""
        self._node = OwnNode(args)
        try:
            await self._node.wait_until_ready()
        except BaseException:
            await self._node.stop()
            raise
        name = serve.get_replica_context().replica_id.unique_id
        logger.info("the node of replica %s is ready at %s", name, self._node.url)
        self._passing = PassingOn(self._node.url, name)
        self._leaving = asyncio.create_task(self._leave_with_node())

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application that answers requests. When Ray shuts it down, the last request
        has been answered: the node ends.
        """

        @asynccontextmanager
        async def life(_: Starlette) -> AsyncIterator[None]:
            yield
            await self._node.stop()
            await self._passing.close()

        return Starlette(routes=[Route("/{path:path}", self._passing)], lifespan=life)

    async def check_health(self) -> None:
        """Raise ServerFailed if the node is dead or not healthy: Ray replaces the replica."""
        await self._node.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metric from which `by_load` finds the number of nodes."""
        return {LOAD: (await self._node.load())[LOAD]}

    async def _leave_with_node(self) -> None:
        """End this process at once when the node's has ended: requests that Ray sends to a dead one
        go to another.
        """
        await self._node.ended.wait()
        if not self._node.stopping:
            logger.error("%s: so does its replica", self._node.problem)
            await asyncio.sleep(LEAVE_S)
            os._exit(1)


def app(args: dict[str, Any]) -> Any:
    """Build the application of Ray Serve from the arguments of `RayArgs`.

    Raises:
        ConfigError: naming argument, value and the allowed values.
    """
    parsed = parse_args(args)
    bundle = parsed.bundle
    deployment = serve.deployment(
        name=NAME,
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0.0)},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=parsed.drain_timeout_s + 2 * END_S,
        **_count(parsed),
    )
    return deployment(Replica).bind(parsed)


def _count(args: RayArgs) -> dict[str, Any]:
    """Return the number of replicas for Ray: a number, or bounds and a policy."""
    if args.max_nodes is None:
        return {"num_replicas": args.fewest}
    scaling = AutoscalingConfig(
        min_replicas=args.fewest,
        max_replicas=args.max_nodes,
        target_ongoing_requests=args.target_requests_per_node,
        upscale_delay_s=args.upscale_delay_s,
        downscale_delay_s=args.downscale_delay_s,
        look_back_period_s=args.look_back_s,
        policy=AutoscalingPolicy(policy_function=by_load),
    )
    return {"autoscaling_config": scaling}
