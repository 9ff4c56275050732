"""The machine of a simulated server: a model on modelled devices, or a live server whose steps were
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flying_lab.sim.cost import Execution, LaneCost
from flying_lab.sim.hardware import RANKS, Devices, problems
from flying_lab.sim.host import NO_TIME, Host, HostTime, host_of
from flying_lab.sim.loans import Loan
from flying_lab.sim.memory import GPU_MEMORY_UTILIZATION, Lent, kv_pool_bytes, lent_bytes
from flying_lab.sim.models import Model
from flying_lab.sim.requests import SimStep
from flying_lab.sim.token_parallel import launched
from flying_lab.sim.transformation import Transformation
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import is_power_of_two
from flying_serving.layout.shards import degree_obstacle, lane_block_tokens
from flying_serving.parallelism import Parallelism
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepCost

BLOCK_TOKENS = 16
"""Tokens of a KV block: vLLM's default on CUDA."""
DegreeTime = Callable[[SimStep], float]
"""Contents of a step of one degree -> seconds."""

# Measured live on CPUs by `benchmarks.coordination`; docs/lab/results.md has medians and spread.
COLLECTIVE_S = 367e-6
"""Seconds from the leader's order of a collective to its begin in the last member.

372, 412 and 538 us for steps of 1, 8 and 32 requests, and a line through them. Each is the 10th
percentile of the least disturbed of 20 rounds.
"""
MESSAGE_S = 250e-6
"""Seconds of a message of the API server to an engine between two steps."""


@dataclass(frozen=True)
class Engine:
    """One engine: its devices, its KV blocks, and tokens in one block by group size."""

    devices: int
    blocks: int
    block_tokens: Mapping[int, int]


@dataclass(frozen=True)
class Modelled:
    """A model on devices of the cost model.

    The server may use a share of their memory, `utilization`. `activations`: peak bytes of
    temporary tensors on each device of an engine; None to estimate them. `host_share`: share of the
    host's work that counts.
    """

    model: Model
    kind: Devices
    utilization: float = GPU_MEMORY_UTILIZATION
    activations: float | None = None
    host_share: float = 1.0

    def __post_init__(self) -> None:
        """Check that the number of devices is a power of two, as groups are aligned."""
        if not is_power_of_two(self.kind.count):
            name = f"{self.kind.hardware.name}x{self.devices}"
            raise ConfigError(f"hardware={name!r}: the number of devices must be a power of two")

    @property
    def devices(self) -> int:
        """The number of devices of the machine."""
        return self.kind.count

    @property
    def frontend_s(self) -> float:
        """Seconds that a server adds to a first token outside of steps."""
        return self.kind.hardware.coefficients.frontend_s.value

    @property
    def smallest_engine(self) -> int:
        """The least number of devices of one engine that hold the weights and a KV cache."""
        for degree in self.degrees(1):
            try:
                self._pool_bytes(degree)
            except ConfigError as error:
                problem = error
            else:
                return degree
        raise problem

    def degrees(self, least: int) -> list[int]:
        """Return the degrees from `least` upwards that the model can be split in here."""
        able = [
            d
            for d in (1, *RANKS)
            if not any(
                degree_obstacle(d, self.model.heads, count) for count in self.model.kv_head_counts
            )
        ]
        return [d for d in able if least <= d <= self.devices]

    def engine(self, resident: int, sizes: Sequence[int], devices: int) -> Engine:
        """Return an engine of `devices` for groups of these sizes, with as many blocks as fit
        beside the weights.

        `resident` devices hold the weights once.
        """
        blocks = int(self._pool_bytes(resident) / self._block_bytes(devices))
        heads = min(self.model.kv_head_counts)
        return Engine(
            devices,
            blocks,
            {size: lane_block_tokens(BLOCK_TOKENS, size, devices, heads) for size in sizes},
        )

    def lent_blocks(self, devices: int, size: int, lent: Lent) -> int:
        """Return the additional blocks of an engine of `devices` in a group of `size` engines with
        weights lent.
        """
        return int(
            lent_bytes(self.model, devices, devices * size, lent) / self._block_bytes(devices)
        )

    def loan(self, devices: int, size: int) -> Loan:
        """Return the loan of engines of `devices` in a group of `size` engines: all divided
        weights, a layer's part at a time.

        Modelled, not measured: a piece comes back from the devices that kept it.
        """
        way = Transformation(self.model, self.kind.hardware, devices, devices * size)
        pieces, kept = (self.model.pieces(degree) for degree in (devices, devices * size))
        sizes = [
            whole.size_bytes - part.size_bytes for whole, part in zip(pieces, kept, strict=True)
        ]
        room = [int(total / self._block_bytes(devices)) for total in accumulate(sizes, initial=0.0)]
        lend_s = [way.piece_s(piece, 0.0) for piece in pieces]
        fetch_s = [
            way.piece_s(piece, size_bytes) for piece, size_bytes in zip(pieces, sizes, strict=True)
        ]
        return Loan(tuple(room), tuple(lend_s), tuple(fetch_s))

    def _pool_bytes(self, resident: int) -> float:
        return kv_pool_bytes(
            self.model, self.kind.hardware, resident, self.utilization, self.activations
        )

    def _block_bytes(self, devices: int) -> int:
        return BLOCK_TOKENS * self.model.kv_bytes_per_token(devices)

    def step_time(self, degree: int, execution: Execution = "graph", size: int = 0) -> DegreeTime:
        """Return the step times of a degree; `size`: of our group, 0 for stock vLLM.

        No step is shorter than the host's work for it.
        """
        devices = self.device_time(degree, execution, size)
        busy = self.host(size, degree).busy

        def seconds(step: SimStep) -> float:
            return max(devices(step), busy.seconds(step.sequences + len(step.chunks)))

        return seconds

    def device_time(self, degree: int, execution: Execution, size: int) -> DegreeTime:
        """Return the times in which the devices compute steps. Our groups of several engines may
        divide a step's tokens.
        """
        model, hardware = self.model, self.kind.hardware
        cost = LaneCost(model, hardware, degree, execution)
        divided = launched(model, hardware, degree // size, degree) if size > 1 else None

        def seconds(step: SimStep) -> float:
            if step.parallelism is Parallelism.TOKEN:
                assert divided is not None, "an engine alone has nobody to divide tokens with"
                return divided(step)
            return cost.step_s(step.sequences, step.decode_context_tokens, step.chunks)

        return seconds

    def host(self, size: int, degree: int) -> Host:
        """Return what the host adds to steps of a degree; `size` as in `step_time`."""
        return host_of(size, degree) * self.host_share

    def turn(self, size: int) -> HostTime:
        """Return how long devices wait where members of our group turn to it from other lanes."""
        return self.host(size, size).in_order

    def migration(self, degree: int) -> MigrationCost | None:
        """Return the cost of KV migration between groups among `degree` devices; None if KV cannot
        migrate.

        Modelled, not measured: every device receives all heads, from one rank after the other,
        after a header.
        """
        hardware = self.kind.hardware
        lines = hardware.all_reduce.get(degree)
        if lines is None:
            return None
        bytes_per_s = hardware.spec.link_bandwidth.value * lines.large.efficiency.value
        fixed_s = COLLECTIVE_S + (1 + degree) * lines.large.latency_s.value
        return MigrationCost(fixed_s, self.model.kv_bytes_per_token(1) / bytes_per_s)

    def handoff(self, degree: int) -> MigrationCost | None:
        """Return the wait of a group of `degree` devices that pulls KV from another one: every
        device its own heads.

        Modelled, not measured: one message of the API server, and a copy at the rate of a large
        all-reduce.
        """
        hardware = self.kind.hardware
        line = hardware.all_reduce[RANKS[0]].large
        bytes_per_s = hardware.spec.link_bandwidth.value * line.efficiency.value
        return MigrationCost(
            MESSAGE_S + line.latency_s.value, self.model.kv_bytes_per_token(degree) / bytes_per_s
        )


class Measured(BaseModel):
    """A live server as `flying-serving fit` found it. Maps are by group size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["flying-serving-machine"] = "flying-serving-machine"
    source: str
    engines: int = Field(ge=1)
    devices_per_engine: int = Field(ge=1)
    blocks: int = Field(ge=2)
    block_tokens: Mapping[int, int]
    step_cost: Mapping[int, StepCost]
    migration_cost: Mapping[int, MigrationCost] = {}
    """By engines of the group that pulls; where an entry is missing, KV does not migrate."""
    frontend_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Measured:
        if sorted(self.block_tokens) != sorted(self.step_cost) or 1 not in self.step_cost:
            raise ValueError(
                "block_tokens and step_cost: must have the same group sizes, 1 among them"
            )
        for field, costs in (
            ("step_cost", self.step_cost),
            ("migration_cost", self.migration_cost),
        ):
            for size, cost in costs.items():
                for name, value in asdict(cost).items():
                    if not 0 <= value < math.inf:
                        raise ValueError(
                            f"{field}.{size}.{name}={value}: must be finite and at least 0"
                        )
        return self

    @property
    def devices(self) -> int:
        """The number of devices of the machine."""
        return self.engines * self.devices_per_engine

    @property
    def smallest_engine(self) -> int:
        """The devices of an engine as the server was started."""
        return self.devices_per_engine

    def degrees(self, least: int) -> list[int]:
        """Return the degrees that were measured, from `least` upwards."""
        return sorted(
            d for d in (s * self.devices_per_engine for s in self.step_cost) if d >= least
        )

    def engine(self, resident: int, sizes: Sequence[int], devices: int) -> Engine:
        """Return an engine with the server's own blocks. A wider stock engine has one member's
        blocks, with more tokens each.
        """
        first = devices // self.devices_per_engine
        return Engine(
            devices, self.blocks, {size: self.block_tokens[size * first] for size in sizes}
        )

    def step_time(self, degree: int, execution: Execution = "graph", size: int = 0) -> DegreeTime:
        """Return the measured step times: in lanes, coordination included.

        Raises:
            ConfigError: for eager execution, which was not measured.
        """
        if execution == "eager":
            raise ConfigError(
                "a measured machine has only the steps that were measured; no eager ones"
            )
        cost = self.step_cost[degree // self.devices_per_engine]

        def seconds(step: SimStep) -> float:
            return cost.step_s(
                step.prefill_tokens, step.sequences, step.context_tokens, step.prefill_pairs
            )

        return seconds

    def turn(self, size: int) -> HostTime:
        """Return no time: what lanes that take turns wait for was not measured."""
        return NO_TIME

    def migration(self, degree: int) -> MigrationCost | None:
        """Return the measured cost of KV migration; None if KV does not migrate."""
        return self.migration_cost.get(degree // self.devices_per_engine)

    def handoff(self, degree: int) -> MigrationCost | None:
        """Return the cost that was measured for a migration among twice as many devices."""
        return self.migration(2 * degree)


Machine = Modelled | Measured
"""A model and the devices that run it."""


def load_measured(path: Path) -> Measured:
    """Read a file that `flying-serving fit` wrote.

    Raises:
        ConfigError: naming the file and each field that is missing or out of range.
    """
    try:
        return Measured.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hardware={str(path)!r}: cannot be read ({error})") from None
    except ValidationError as error:
        raise ConfigError(f"--hardware={str(path)!r}: {problems(error)}") from None


def from_status(status: Mapping[str, Any], source: str, frontend_s: float) -> Measured:
    """Return the machine behind an answer of `GET /flying/status`, which lacks `frontend_s`; errors
    name `source`.

    Raises:
        ConfigError: a field is missing, or a lane's steps were never measured.
    """
    try:
        sizes = [int(size) for size in status["group_sizes"]]
        costs = {int(size): dict(cost) for size, cost in status["step_cost"].items()}
        blocks = min(int(engine["blocks"]) for engine in status["engines"])
        capacity = {int(size): int(tokens) for size, tokens in status["capacity_tokens"].items()}
        found = {
            "source": source,
            "engines": len(status["engines"]),
            "devices_per_engine": int(status["devices_per_engine"]),
            "blocks": blocks,
            "migration_cost": {
                int(size): dict(cost) for size, cost in status.get("migration_cost", {}).items()
            },
            "frontend_s": frontend_s,
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source}: no status of a Flying Serving server ({error!r})") from None
    unknown = sorted(set(sizes) - set(costs))
    if unknown:
        raise ConfigError(
            f"{source}: no step of group size {unknown[0]} was measured; start it with --policy "
            "auto"
        )
    if blocks < 2 or not set(sizes) <= set(capacity):
        raise ConfigError(
            f"{source}: blocks={blocks}, capacity_tokens={capacity}: one for each of {sizes} is "
            "needed"
        )
    found["block_tokens"] = {size: capacity[size] // (blocks - 1) for size in sizes}
    found["step_cost"] = {size: costs[size] for size in sizes}
    try:
        return Measured.model_validate(found)
    except ValidationError as error:
        raise ConfigError(f"{source}: {problems(error)}") from None
