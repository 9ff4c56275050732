"""The state of a server at one moment for the live view, as plain JSON."""

import time
from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from flying_serving.controller.controller import Controller
from flying_serving.layout.groups import Group
from flying_serving.observe.view.rolling import WINDOW_S, Rolling
from flying_serving.wire import EngineFigures

SHOWN_SWITCHES = 40
SHOWN_SPLITS = 4


def state(
    controller: Controller,
    rolling: Rolling,
    latest: Mapping[int, EngineFigures],
    now_s: float,
    **server: Any,
) -> dict[str, Any]:
    """Return the answer of `GET /flying/view` at `now_s`, the controller's time. Calls
    `rolling.look`.

    `latest`: the last figures of each engine. `server`: further fields, about the server as it was
    started (model, `started` as `time`, ...).
    """
    rolling.look(now_s)
    layout, pool, switches = (
        controller.state.layout,
        controller.state.pool,
        controller.state.switches.kept,
    )
    engines = range(controller.settings.engines)
    others = sorted(group for group in controller.state.loads.groups if group not in layout.groups)
    oldest_s = pool.oldest_s
    recent = list(switches)[-SHOWN_SWITCHES:]
    hard = bool(recent) and recent[-1].mode == "hard"
    return {
        **server,
        "time": time.time(),
        "policy": controller.settings.policy.name,
        "max_num_seqs": controller.settings.limits.max_num_seqs,
        "layout": layout.to_lists(),
        "changing": controller.changeover.is_under_way,
        "groups": [
            _group(controller, group) | {"figures": rolling.figures(group, now_s)}
            for group in layout.groups
        ],
        "others": [
            _group(controller, group) | {"state": "paused" if hard else "woven"} for group in others
        ],
        "splits": _splits(controller),
        "engines": [_engine(controller, rolling, latest, engine) for engine in engines],
        "running": controller.state.running,
        "pool": {
            "requests": len(pool),
            "urgent": pool.urgent,
            "prompt_tokens": pool.prompt_tokens,
            "oldest_s": None if oldest_s is None else now_s - oldest_s,
        },
        "rolling": rolling.figures(engines, now_s) | {"window_s": WINDOW_S},
        "switch_count": controller.state.switches.count,
        "switches": [switch.to_json() | {"open": switch.open} for switch in recent],
    }


def _group(controller: Controller, group: Group) -> dict[str, Any]:
    work = controller.state.loads[group]
    capacity = controller.settings.capacity
    return {
        "engines": list(group),
        "degree": capacity.degree(len(group)),
        "requests": len(work.requests),
        "prefill_tokens": work.prefill_tokens,
        "held_tokens": work.prompt_tokens + work.output_tokens - work.prefill_tokens,
        "capacity_tokens": controller.state.rooms.tokens(group)
        if len(group) in capacity.kv_tokens
        else None,
    }


def _splits(controller: Controller) -> dict[str, Any]:
    """Return how many requests two groups share and have shared, and the groups of the oldest ones.

    `at`: tokens that the first group computes, `rest`: tokens that the second is expected to
    compute.
    """
    splits, counts = controller.state.splits, controller.state.splits.counts
    shown = []
    for request_id, split in list(splits.open.items())[:SHOWN_SPLITS]:
        tokens = max(
            split.part.committed_tokens, controller.state.started[request_id].committed_tokens
        )
        rest = max(1, round(tokens) - split.at)
        shown.append(
            {
                "first": list(split.kv.group),
                "second": list(split.second),
                "at": split.at,
                "rest": rest,
            }
        )
    return {
        "now": len(splits),
        "begun": counts.prompt + counts.output,
        "undone": counts.undone,
        "shown": shown,
    }


def to_ask(controller: Controller, latest: Mapping[int, EngineFigures]) -> list[int]:
    """Return the engines whose memory figures are missing or may be out of date."""
    engines, lends_now = controller.state.layout.engines, controller.state.weight_lending.lends_now
    return [
        engine
        for engine in sorted(engines)
        if engine not in latest or latest[engine].memory.lent_bytes or lends_now(engine)
    ]


def _engine(
    controller: Controller, rolling: Rolling, latest: Mapping[int, EngineFigures], engine: int
) -> dict[str, Any]:
    """Return the figures of an engine. If it has no requests, it holds nothing.

    An engine whose last requests were aborted has had no step that reports it. `memory`: an
    `EngineMemory` of all its devices together; None before the engine has reported.
    """
    usage = rolling.kv_usage(engine) if controller.state.loads.of_engine(engine) else 0.0
    devices = controller.settings.capacity.degree(1)
    memory = to_builtins(latest[engine].memory) if engine in latest else None
    if memory is not None:
        memory = {name: size_bytes * devices for name, size_bytes in memory.items()}
    return {"engine": engine, "kv_usage": usage, "memory": memory}
