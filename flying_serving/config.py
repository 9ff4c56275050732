"""Settings of a Flying Serving server: frozen, validated, carried to all processes in vLLM's `additional_config`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flying_serving.errors import ConfigError
from flying_serving.layout.groups import is_power_of_two

KEY = "flying_serving"
MAX_ENGINES = 8

Preempt = Literal["weave", "hard", "sequential"]
PREEMPTS: tuple[str, ...] = ("weave", "hard", "sequential")


class FlyingConfig(BaseModel):
    """What a user may set (`flying-serving serve --help`, or `--additional-config '{"flying_serving": {...}}'`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_sizes: tuple[int, ...] | None = None
    """Engines per group that may be bound, 1 always among them. None: all powers of two that the model allows."""
    policy: Literal["manual"] = "manual"
    cpu_collectives: Literal["shm", "gloo"] = "shm"
    weave_steps: int = Field(default=1, ge=1, le=1000)
    """Steps of the present layout for each step of an older one that is still draining."""
    max_pause_ms: float = Field(default=1000.0, ge=1, le=3_600_000)
    """A paused lane gets a step at least this often."""
    collective_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    lend_blocks: int = Field(default=16, ge=1, le=1_000_000)
    """Blocks that a group asks its members for at a time, at the least."""

    @field_validator("group_sizes")
    @classmethod
    def _sizes(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        for size in value:
            if not is_power_of_two(size) or size > MAX_ENGINES:
                raise ValueError(f"group size {size} is not one of 1, 2, 4, 8")
        if 1 not in value:
            raise ValueError("1 must be among the group sizes")
        return tuple(sorted(set(value)))


class Deployment(BaseModel):
    """What a launch adds for its processes to find each other. Not set by users."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: str
    engines: int = Field(ge=1, le=MAX_ENGINES)
    devices: int = Field(ge=1)
    """Devices per engine (vLLM's --tensor-parallel-size)."""
    group_sizes: tuple[int, ...]
    flying: FlyingConfig

    @model_validator(mode="after")
    def _aligned(self) -> Deployment:
        if not is_power_of_two(self.engines):
            raise ValueError(f"--data-parallel-size {self.engines} is not one of 1, 2, 4, 8")
        return self

    @property
    def widest(self) -> int:
        """Engines in the widest group."""
        return self.group_sizes[-1]

    @property
    def lanes(self) -> tuple[int, ...]:
        """Group sizes beyond 1."""
        return self.group_sizes[1:]


def parse_flying(raw: dict[str, Any]) -> FlyingConfig:
    """Validate a user's settings.

    Raises:
        ConfigError: naming field, value and what is allowed.
    """
    try:
        return FlyingConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from None


def deployment_of(additional_config: dict[str, Any]) -> Deployment:
    """The deployment that the launcher put into vLLM's `additional_config`."""
    return Deployment.model_validate(additional_config[KEY])


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    field = ".".join(map(str, problem["loc"])) or "flying_serving"
    return f"{field}={problem['input']!r}: {problem['msg']}"
