"""What `status` and `switches` print: why the layout changed, or why it stays."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from flying_serving.cli import render
from flying_serving.config import Deployment, FlyingConfig
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.server.engine_record import Loss
from flying_serving.server.figures.losses import Losses
from flying_serving.server.figures.status import describe
from flying_serving.server.requests.draining import Draining
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.server.figures.states import losses_of

APART, TOGETHER = Layout.uniform(2, 1), Layout.uniform(2, 2)
LOAD = Decision(
    TOGETHER,
    "migrate",
    "load: 1.16 requests/s, 1 waiting",
    13.05,
    0.066,
    {"migrate": 0.066},
    62.98,
    7.72,
)


def drawn(shown: RenderableType) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def status(shell: ModelShell, losses: Losses | None = None) -> dict[str, Any]:
    """The answer of `GET /flying/status`, without what engines say."""
    flying = FlyingConfig()
    deployment = Deployment(run_dir="", engines=2, devices=1, group_sizes=(1, 2), flying=flying)
    known = describe(shell.controller, deployment) | (losses or losses_of(2)).to_json()
    requests = {
        "running": shell.controller.state.running,
        "waiting": len(shell.controller.state.pool),
    }
    return known | {"engines": [], "requests": requests, "load": Draining().to_json(0)}


@pytest.mark.parametrize(
    ("decision", "cells"),
    [
        (LOAD, ["load: 1.16 requests/s, 1 waiting", "13.05", "7.72", "0.07"]),
        (
            Decision(TOGETHER, "hard", "context: [b]", math.inf, 2.5),
            ["context: [b]", "-", "-", "2.50"],
        ),
        (None, ["ordered by an operator", "-", "-", "-"]),
    ],
)
def test_a_switch_shows_its_reason_gain_and_cost(
    decision: Decision | None, cells: list[str]
) -> None:
    switch = Switch(APART, TOGETHER, "migrate", 1.0, 4, decision, number=3, ordered_s=1.0)
    seen = ["-", "-"]
    if decision is LOAD:
        switch.predicted_share, switch.seen_share, seen = 0.123, -0.04, ["+12%", "-4%"]
    rows = [
        line
        for line in drawn(render.switches([switch.to_json()])).splitlines()
        if line.startswith("│ ")
    ]
    assert [cell.strip() for cell in rows[0].strip("│").split("│")] == [
        "3",
        "0 1",
        "0,1",
        "migrate",
        *cells,
        *seen,
    ]
    assert [cell.strip() for cell in rows[1].strip("│").split("│")][:3] == ["3", "4", "0.0"]


def test_status_says_why_the_layout_stays() -> None:
    """Only if layouts were compared, and none is formed."""
    shell = ModelShell(settings("auto", 2))
    assert "stays" not in drawn(render.status(status(shell)))
    for decision in (LOAD, Decision(TOGETHER, "hard", "context: x", math.inf, 2.5)):
        shell.controller.decider.last = decision
        assert "stays" not in drawn(render.status(status(shell)))
    shell.controller.decider.last = Decision(
        TOGETHER, "", "load: x", 5.0, 0.0, stay=62.98, least_gain=7.5
    )
    text = drawn(render.status(status(shell)))
    assert "stays: 0,1 would gain 5.00 request-s and has to gain more than 7.50" in text
    assert "0 running, 0 waiting for a group" in text
    shell.controller.decider.last = replace(shell.controller.decider.last, unsure_at=1.25)
    text = drawn(render.status(status(shell)))
    assert "would gain 5.00 request-s, but too little if 1.25 requests/s arrive" in text


def test_status_names_a_lost_engine_since_when_and_why() -> None:
    """Reasons are no markup. One that is back, and in no layout so far, is shown too."""
    shell, losses = ModelShell(settings("auto", 2)), losses_of(2)
    assert "degraded" not in drawn(render.status(status(shell)))
    losses.lost(1, Loss(0.0, "[red]killed"), shell.controller.state.layout, frozen=False)
    shell.controller.state.layout = shell.controller.state.layout.without({1})
    report = {"engine": 1, "blocks": 9, "free_blocks": 8, "lent_blocks": {}, "lanes": {}}
    text = drawn(render.status(status(shell, losses) | {"engines": [report]}))
    assert "engine 1 is lost: [red]killed" in text
    assert re.search(r"degraded since (1969|1970)-\d\d-\d\d \d\d:\d\d:\d\d", text)
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    assert rows == [["1", "-", "9", "8", *["-"] * 3], ["1", "lost", *["-"] * 5]]


def test_status_says_that_the_server_drains() -> None:
    """And when it may be stopped; so does `drain`."""
    answer, draining = status(ModelShell(settings("auto", 2))), Draining()
    assert "drain" not in drawn(render.status(answer))
    draining.begin()
    assert "draining: requests run" in drawn(render.status(answer | {"load": draining.to_json(1)}))
    assert "draining: ready to stop" in drawn(render.status(answer | {"load": draining.to_json(0)}))
    assert (
        drawn(render.drain(draining.to_json(2) | {"requests": 2}))
        == "draining: 2 requests are left\n"
    )
    assert "ready to stop" in drawn(render.drain(draining.to_json(0) | {"requests": 0}))
    assert "takes new requests" in drawn(render.drain(Draining().to_json(0) | {"requests": 3}))


def test_dry_run_shows_its_decision_with_gain_and_cost() -> None:
    shell = ModelShell(settings("auto", 2, dry_run=True))
    shell.controller.decider.dry_run.append(LOAD)
    (shown,) = status(shell)["would_do"]
    assert shown["to"] == [[0, 1]]
    assert shown["mode"] == "migrate"
    assert shown["is_made"] is True
    assert shown["predicted_gain_request_s"] == 13.05
    assert shown["predicted_cost_request_s"] == 0.066
