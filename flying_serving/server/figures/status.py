"""The controller's part of `GET /flying/status`, as plain JSON."""

from dataclasses import asdict
from typing import Any

from flying_serving.config import Deployment
from flying_serving.controller.controller import Controller
from flying_serving.controller.switches import predictions
from flying_serving.policy.snapshot import Decision
from flying_serving.predict.work import costs_by_size


def describe(controller: Controller, deployment: Deployment) -> dict[str, Any]:
    """Return the policy, the layout, capacities, costs and decisions of the controller."""
    return {
        "policy": controller.settings.policy.name,
        "layout": controller.state.layout.to_lists(),
        "group_sizes": list(deployment.group_sizes),
        "not_offered": {str(size): reason for size, reason in deployment.not_offered.items()},
        "devices_per_engine": deployment.devices,
        "capacity_tokens": {
            str(size): tokens for size, tokens in controller.settings.capacity.kv_tokens.items()
        },
        "lent_capacity_tokens": controller.settings.capacity.lent_tokens or None,
        "weights": _weights(controller),
        **costs_by_size(controller.state.lane_figures()),
        "migration_cost": {
            str(size): asdict(cost) for size, cost in controller.state.migrates.items()
        },
        "splits": asdict(controller.state.splits.counts),
        "kept_room": _kept_room(controller),
        "last_decision": None
        if controller.decider.last is None
        else _decision(controller.decider.last),
        "would_do": [_decision(decision) for decision in controller.decider.dry_run],
    }


def _kept_room(controller: Controller) -> dict[str, Any] | None:
    """Return which engines keep room for the next long request, and for how many tokens."""
    reservation = controller.state.reservation
    if not reservation.group:
        return None
    return {"engines": list(reservation.group), "tokens": round(reservation.tokens)}


def _weights(controller: Controller) -> dict[str, str]:
    """Return where the weights of each widest group are, if groups lend them."""
    if not controller.state.weight_lending.lends:
        return {}
    return {
        ",".join(map(str, group)): phase.value
        for group, phase in controller.state.weight_lending.phases.items()
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "to": decision.layout.to_lists(),
        "mode": decision.mode,
        "is_made": decision.is_made,
        **predictions(decision),
    }
