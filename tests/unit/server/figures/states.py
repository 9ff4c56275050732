"""A server's state as the live view shows it, from a controller without engines."""

from collections.abc import Mapping
from typing import Any

from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.observe.view.rolling import Rolling
from flying_serving.server.engine_record import EngineRecord
from flying_serving.server.figures.losses import Losses
from flying_serving.server.figures.state import state
from flying_serving.wire import EngineFigures, EngineMemory, MigrationCounts
from tests.unit.controller.model_settings import ANSWER, settings


def look(
    controller: Controller,
    rolling: Rolling,
    now_s: float,
    known: Mapping[int, EngineFigures] | None = None,
    losses: Losses | None = None,
) -> dict[str, Any]:
    """The answer of `GET /flying/view`; `known`: what engines have last said."""
    server = {"started": 0.0, "model": "llama", "devices_per_engine": 1, "group_sizes": [1, 2, 4]}
    known, losses = known or {}, losses or losses_of(4)
    return state(controller, rolling, known, now_s, **server, **losses.view())


def losses_of(engines: int) -> Losses:
    """The losses of a server that has lost none of its engines yet."""
    return Losses([EngineRecord(engine) for engine in range(engines)])


def having(memory: EngineMemory) -> EngineFigures:
    """What an engine says of which nothing but its memory matters."""
    return EngineFigures(False, {}, {}, {}, {}, {}, MigrationCounts(0, 0, 0), memory)


def switched(mode: str = "weave") -> tuple[Controller, Rolling]:
    """Of four engines one has a request with two tokens; then 0 and 1 merge, and more come than
    there is room for.
    """
    controller, rolling = Controller(settings("manual", max_num_seqs=1, capped=True)), Rolling(4)
    rolling.look(1.0)
    controller.arrived("old", RequestSpec(30, 50, 20), 1.0)
    controller.got_tokens("old", 2, 1.5)
    rolling.note_batch(0, 0.25, 2, [0.5], [0.1], 1.5)
    controller.begin_switch(Layout(((0, 1), (2,), (3,))), mode, None, 2.0)
    controller.acknowledged([ANSWER], 2.1)
    for number in range(5):
        controller.arrived(f"new{number}", RequestSpec(10, 20, 10), 3.0 + number)
    return controller, rolling
