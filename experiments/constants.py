"""The policy's constants that are tried on other values, and how a run has another value."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Constant(NamedTuple):
    """A constant of the policy: an attribute of `module`, one or several numbers, each scaled to
    `most` at most.
    """

    name: str
    unit: str
    purpose: str
    module: str
    most: float = math.inf


CONSTANTS = (
    Constant(
        "FORECAST_ERROR",
        "share",
        "gain below which forecasts cannot tell layouts apart",
        "policy.policies",
    ),
    Constant("URGENCY", "s/s", "a second of an urgent request", "predict.work"),
    Constant("BIN_S", "s", "resolution of arrivals", "predict.arrivals"),
    Constant("CHANGE_S", "s", "how long a rate lasts", "predict.arrivals"),
    Constant("AHEAD", "times mean", "rate that a change is expected to bring", "predict.arrivals"),
    Constant("LEAST_RATE", "1/s", "rate that an idle server expects", "predict.arrivals"),
    Constant(
        "MAX_UTILIZATION",
        "share",
        "load up to which a queue reaches its mean",
        "predict.rollout",
        0.99,
    ),
    Constant("LENGTHS_CV", "std/mean", "variation of prompt lengths", "predict.rollout"),
    Constant("MEMORY_REQUESTS", "requests", "over which lengths are averaged", "predict.lifetimes"),
    Constant("MEMORY_STEPS", "steps", "after which a measured step has faded", "predict.steps"),
    Constant("PRIOR_STEPS", "steps", "weight of a measurement of the start", "predict.steps"),
    Constant(
        "PATIENCE", "times", "predicted drain that a switch waits for", "controller.changeover"
    ),
    Constant("STEPS_AHEAD", "steps", "prompts that a group has at most", "controller.group_choice"),
    Constant("FIRST_TOKENS", "tokens", "lengths expected before any request", "predict.demand"),
    Constant("FEW", "tokens", "first tokens of a step that may cost more", "predict.steps"),
    Constant("SOME", "tokens", "the same", "predict.steps"),
    Constant(
        "_MOST_ADDED", "share", "what serving may add to a step in other lanes", "predict.steps"
    ),
    Constant(
        "_HELD", "share", "how close what serving adds is held to other lanes", "predict.steps"
    ),
    Constant("_REFIT_STEPS", "steps", "between two fits of a lane", "predict.steps"),
)
"""The constants that decide and are tried; `--horizon-s` and `--priority-aging-s` are settings."""


@contextmanager
def scaled(constant: Constant, factor: float) -> Iterator[None]:
    """Let a constant have another value for a while."""
    module = importlib.import_module(f"flying_serving.{constant.module}")
    value = getattr(module, constant.name)
    if isinstance(value, list | tuple):
        changed = type(value)(type(one)(one * factor) for one in value)
    else:
        changed = type(value)(min(constant.most, value * factor))
    setattr(module, constant.name, changed)
    try:
        yield
    finally:
        setattr(module, constant.name, value)
