"""What a simulated server runs on: a model on modelled devices, or a live server whose steps were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flying_serving.errors import ConfigError
from flying_serving.layout.groups import is_power_of_two
from flying_serving.layout.shards import degree_obstacle, lane_block_tokens
from flying_serving.predict.moves import MoveCost
from flying_serving.predict.steps import StepCost
from flying_serving.sim.coordination import GROUP_STEP_S, DegreeTime, coordinated
from flying_serving.sim.cost import Execution, LaneCost
from flying_serving.sim.hardware import RANKS, Devices
from flying_serving.sim.memory import GPU_MEMORY_UTILIZATION, kv_pool_bytes
from flying_serving.sim.models import Model
from flying_serving.sim.requests import SimStep

BLOCK_TOKENS = 16
"""vLLM's default on CUDA."""


@dataclass(frozen=True)
class Engine:
    """One engine's memory: KV blocks, and tokens in one block by group size."""

    blocks: int
    block_tokens: Mapping[int, int]


class Machine(Protocol):
    """Devices with a model on them."""

    @property
    def devices(self) -> int:
        """How many."""

    @property
    def frontend_s(self) -> float:
        """What a server adds to a first token outside of steps."""

    @property
    def smallest_engine(self) -> int:
        """Devices that one engine needs at least."""

    def degrees(self, least: int) -> list[int]:
        """Degrees from `least` upwards that the model can be split in here."""

    def engine(self, resident: int, sizes: Sequence[int], devices: int) -> Engine:
        """The memory of an engine.

        Args:
            resident: devices that hold the weights once.
            sizes: group sizes.
            devices: devices of the engine.
        """

    def step_time(self, degree: int, execution: Execution = "graph") -> DegreeTime:
        """How long steps of a degree take."""

    def lane_time(self, degree: int, size: int, execution: Execution = "graph") -> DegreeTime:
        """How long steps of a lane of ours take: those of a degree, and what it costs to coordinate `size` engines."""

    def moving(self, degree: int) -> MoveCost | None:
        """The cost of moving KV between groups among `degree` devices; None if KV cannot move."""


@dataclass(frozen=True)
class Modelled:
    """A model on devices of the cost model.

    Args:
        model: what runs.
        kind: the devices.
        utilization: share of the devices' memory that the server may use.
    """

    model: Model
    kind: Devices
    utilization: float = GPU_MEMORY_UTILIZATION

    def __post_init__(self) -> None:
        """Groups are aligned, so the number of devices is a power of two."""
        if not is_power_of_two(self.kind.count):
            raise ConfigError(f"hardware={self.kind.name!r}: the number of devices must be a power of two")

    @property
    def devices(self) -> int:
        """How many."""
        return self.kind.count

    @property
    def frontend_s(self) -> float:
        """What a server adds to a first token outside of steps."""
        return self.kind.hardware.coefficients.frontend_s.value

    @property
    def smallest_engine(self) -> int:
        """Devices that hold the weights and leave room for a KV cache."""
        for degree in self.degrees(1):
            try:
                kv_pool_bytes(self.model, self.kind.hardware, degree, self.utilization)
            except ConfigError as error:
                problem = error
            else:
                return degree
        raise problem

    def degrees(self, least: int) -> list[int]:
        """Degrees from `least` upwards that the model can be split in here."""
        able = [d for d in (1, *RANKS) if degree_obstacle(d, self.model.heads, self.model.kv_heads) is None]
        return [d for d in able if least <= d <= self.devices]

    def engine(self, resident: int, sizes: Sequence[int], devices: int) -> Engine:
        """As many blocks as fit beside the weights."""
        pool = kv_pool_bytes(self.model, self.kind.hardware, resident, self.utilization)
        blocks = int(pool / (BLOCK_TOKENS * self.model.kv_bytes_per_token(devices)))
        heads = self.model.kv_heads
        return Engine(blocks, {size: lane_block_tokens(BLOCK_TOKENS, size, devices, heads) for size in sizes})

    def step_time(self, degree: int, execution: Execution = "graph") -> DegreeTime:
        """The cost model."""
        cost = LaneCost(self.model, self.kind.hardware, degree, execution)

        def seconds(plan: SimStep) -> float:
            return cost.step_s(plan.sequences, plan.decode_context_tokens, plan.chunks)

        return seconds

    def lane_time(self, degree: int, size: int, execution: Execution = "graph") -> DegreeTime:
        """The cost model, and what was measured of the host's part."""
        return coordinated(self.step_time(degree, execution), size)

    def moving(self, degree: int) -> MoveCost | None:
        """Modelled, not measured: every device receives all heads, from one rank after the other, after a header."""
        hardware = self.kind.hardware
        lines = hardware.all_reduce.get(degree)
        if lines is None:
            return None
        bytes_per_s = hardware.spec.link_bandwidth.value * lines.large.efficiency.value
        fixed_s = GROUP_STEP_S + (1 + degree) * lines.large.latency_s.value
        return MoveCost(fixed_s, self.model.kv_bytes_per_token(1) / bytes_per_s)


class _MachineData(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MeasuredCost(_MachineData):
    """A `StepCost` as a server's controller has learned it."""

    fixed_s: float = Field(ge=0, allow_inf_nan=False)
    prefill_token_s: float = Field(ge=0, allow_inf_nan=False)
    sequence_s: float = Field(ge=0, allow_inf_nan=False)
    context_token_s: float = Field(ge=0, allow_inf_nan=False)
    few_token_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    some_token_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    prefill_pair_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @cached_property
    def cost(self) -> StepCost:
        """The same for the policies."""
        return StepCost(**self.model_dump())

    def seconds(self, plan: SimStep) -> float:
        """Of one step."""
        return self.cost.step_s(plan.prefill_tokens, plan.sequences, plan.context_tokens, plan.prefill_pairs)


class MeasuredMove(_MachineData):
    """A `MoveCost` as a server's engines have measured it."""

    fixed_s: float = Field(ge=0, allow_inf_nan=False)
    token_s: float = Field(ge=0, allow_inf_nan=False)


class Measured(_MachineData):
    """A live server as `flying-serving fit` found it. Maps are by group size."""

    format: Literal["flying-serving-machine"] = "flying-serving-machine"
    source: str
    engines: int = Field(ge=1)
    devices_per_engine: int = Field(ge=1)
    blocks: int = Field(ge=2)
    block_tokens: Mapping[int, int]
    step_cost: Mapping[int, MeasuredCost]
    move_cost: Mapping[int, MeasuredMove] = {}
    """By engines in the cover; where it is missing, KV does not move."""
    frontend_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _same_sizes(self) -> Measured:
        if sorted(self.block_tokens) != sorted(self.step_cost) or 1 not in self.step_cost:
            raise ValueError("block_tokens and step_cost: must have the same group sizes, 1 among them")
        return self

    @property
    def devices(self) -> int:
        """How many."""
        return self.engines * self.devices_per_engine

    @property
    def smallest_engine(self) -> int:
        """As the server was started."""
        return self.devices_per_engine

    def degrees(self, least: int) -> list[int]:
        """The degrees that were measured."""
        return sorted(d for d in (s * self.devices_per_engine for s in self.step_cost) if d >= least)

    def engine(self, resident: int, sizes: Sequence[int], devices: int) -> Engine:
        """The server's own blocks; a wider static engine has those of one member, with more tokens each."""
        first = devices // self.devices_per_engine
        return Engine(self.blocks, {size: self.block_tokens[size * first] for size in sizes})

    def step_time(self, degree: int, execution: Execution = "graph") -> DegreeTime:
        """As measured.

        Raises:
            ConfigError: for eager execution, which nobody has measured.
        """
        if execution == "eager":
            raise ConfigError("a measured machine has only the steps that were measured; no eager ones")
        return self.step_cost[degree // self.devices_per_engine].seconds

    def lane_time(self, degree: int, size: int, execution: Execution = "graph") -> DegreeTime:
        """As measured: in lanes, coordination included."""
        return self.step_time(degree, execution)

    def moving(self, degree: int) -> MoveCost | None:
        """As measured."""
        found = self.move_cost.get(degree // self.devices_per_engine)
        return MoveCost(found.fixed_s, found.token_s) if found is not None else None


def load_measured(path: Path) -> Measured:
    """Read what `flying-serving fit` wrote.

    Raises:
        ConfigError: naming the file and each field that is missing or out of range.
    """
    try:
        return Measured.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hardware={str(path)!r}: cannot be read ({error})") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"--hardware={str(path)!r}: {problems}") from None
