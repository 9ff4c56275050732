"""A machine file from what a live server says of itself: steps as its controller has learned them, and its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from flying_serving.errors import ConfigError
from flying_serving.sim.machine import Measured


def from_status(status: Mapping[str, Any], source: str, frontend_s: float) -> Measured:
    """The machine behind an answer of `GET /flying/status`.

    Args:
        status: the answer.
        source: where it is from, for the file and for messages.
        frontend_s: what the server adds to a first token outside of steps; the status does not say.

    Raises:
        ConfigError: a field is missing, or a lane's steps were never measured.
    """
    try:
        sizes = [int(size) for size in status["group_sizes"]]
        costs = {int(size): dict(cost) for size, cost in status["step_cost"].items()}
        moves = {int(size): dict(cost) for size, cost in status.get("move_cost", {}).items()}
        blocks = min(int(engine["blocks"]) for engine in status["engines"])
        capacity = {int(size): int(tokens) for size, tokens in status["capacity_tokens"].items()}
        devices = int(status["devices_per_engine"])
        engines = len(status["engines"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source}: no status of a Flying Serving server ({error!r})") from None
    unknown = sorted(set(sizes) - set(costs))
    if unknown:
        raise ConfigError(f"{source}: no step of group size {unknown[0]} was measured; start it with --policy auto")
    if blocks < 2 or not set(sizes) <= set(capacity):
        raise ConfigError(f"{source}: blocks={blocks}, capacity_tokens={capacity}: one for each of {sizes} is needed")
    try:
        return Measured(
            source=source,
            engines=engines,
            devices_per_engine=devices,
            blocks=blocks,
            block_tokens={size: capacity[size] // (blocks - 1) for size in sizes},
            step_cost={size: costs[size] for size in sizes},  # type: ignore[misc]
            move_cost=moves,  # type: ignore[arg-type]
            frontend_s=frontend_s,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{source}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
