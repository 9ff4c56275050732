"""The devices of an emulated engine, as the worker gets them in vLLM's `additional_config`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flying_lab.sim import models
from flying_lab.sim.cost import Execution
from flying_lab.sim.hardware import parse_devices
from flying_lab.sim.machine import Modelled
from flying_lab.sim.requests import SimStep
from flying_serving.errors import ConfigError
from flying_serving.predict.migrations import MigrationCost

KEY = "emulated"
"""The name of the profile in vLLM's `additional_config`."""


class Profile(BaseModel):
    """A model on devices of the simulator's cost model, and how fast they run.

    Args:
        hardware: kind and number of the server's devices, like `h200x8`.
        model: a packaged model of the simulator, or the path of a config.json.
        devices_per_engine: devices that hold the weights once.
        execution: steps in CUDA graphs where vLLM has them, or eager ones.
        slowdown: each step lasts this many times as long as on the devices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hardware: str
    model: str
    devices_per_engine: int = Field(ge=1)
    execution: Execution = "graph"
    slowdown: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @cached_property
    def machine(self) -> Modelled:
        """Return the whole machine. Raises ConfigError for unknown devices or models."""
        return Modelled(models.load(self.model), parse_devices(self.hardware))

    @property
    def engines(self) -> int:
        """The number of engines that the devices make."""
        return self.machine.devices // self.devices_per_engine

    def blocks(self) -> int:
        """Return the KV blocks of an engine, whose weights its devices hold once."""
        return self.machine.engine(self.devices_per_engine, (1,), self.devices_per_engine).blocks

    def lane(self, size: int) -> EmulatedLane:
        """Return the times of a group of `size` engines."""
        return EmulatedLane(self, size)


class EmulatedLane:
    """The times of a group of engines: seconds on this machine's clock."""

    def __init__(self, profile: Profile, size: int) -> None:
        degree = profile.devices_per_engine * size
        self._slowdown = profile.slowdown
        self._device_s = profile.machine.device_time(degree, profile.execution, size)
        self._pull: MigrationCost | None = profile.machine.migration(degree)

    def step_s(self, step: SimStep) -> float:
        """Return the seconds of a step on the devices alone: the engines' host work is real."""
        return self._device_s(step) * self._slowdown

    def pull_s(self, tokens: int) -> float:
        """Return the seconds of a copy of the KV of this many tokens into the group."""
        if self._pull is None:
            return 0.0
        return self._pull.seconds(tokens) * self._slowdown


def profile_of(additional_config: dict[str, Any]) -> Profile:
    """Return the profile in vLLM's `additional_config`. Raises ConfigError if there is none."""
    if KEY not in additional_config:
        raise ConfigError(f"--additional-config: {KEY!r} is missing; start with `emulate`")
    return Profile.model_validate(additional_config[KEY])
