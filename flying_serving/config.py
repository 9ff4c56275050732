"""Settings of a Flying Serving server: frozen, validated, carried to all processes in vLLM's
`additional_config`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flying_serving.errors import ConfigError
from flying_serving.layout.groups import is_power_of_two
from flying_serving.log import logger
from flying_serving.placement.plan import Placement, device_name
from flying_serving.policy.steering import Steering
from flying_serving.slo import Slo, parse_slo
from flying_serving.validation import first_problem

KEY = "flying_serving"
MAX_ENGINES = 8

MODES: tuple[str, ...] = ("weave", "hard", "sequential", "soft", "migrate")
MIGRATING_MODES = ("soft", "migrate")
"""With these some requests migrate, once the engines whose groups change have answered."""
LOAN_SHARE = 0.05
"""Share of an engine's time for pieces of weights that go or come while requests run."""
TOLD_S = 5.0
"""Seconds after an engine counts as lost in which the others may not know it."""
Collectives = Literal["shm", "staged", "pynccl", "gloo", "nccl"]
"""How devices of a group exchange tensors: with `shm` through shared memory, with `staged` by way
of a host buffer too. `pynccl` is NCCL in groups that can lose an engine. The others are torch's.
"""
ONE_WORLD: frozenset[Collectives] = frozenset({"gloo", "nccl"})
"""Collectives for which all engines are in one torch world. With the others each
engine has its own.
"""
PolicyName = Literal[
    "auto", "load", "priority", "context", "gyges", "static-dp", "static-tp", "split", "manual"
]


class FlyingConfig(BaseModel):
    """The settings of a user (`flying-serving serve --help`, or `--additional-config
    '{"flying_serving": {...}}'`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    group_sizes: tuple[int, ...] | None = None
    """Engines per group, like 1,2,4. Powers of two up to 8, with 1 among them. At its start the
    server names the sizes that the model does not allow, and why. Default: all that the model
    allows.
    """
    policy: PolicyName = "auto"
    """Rule that decides the layout. `auto` combines `load`, `priority` and `context`. With
    `gyges` engines join for long requests alone, for which they keep room. With `split` they stay
    apart and share requests. With `manual` an operator decides.
    """
    policy_dry_run: bool = False
    """Only record the policy's decisions. They are `would_do` in /flying/status, with gain and
    cost.
    """
    horizon_s: float = Field(default=20.0, gt=0, le=3600)
    """Seconds ahead over which layouts are compared."""
    weave_steps: int = Field(default=1, ge=1, le=1000)
    """Steps of the present layout per step of one that drains. A layout drains while requests run
    in it that were there before the switch.
    """
    max_pause_ms: float = Field(default=1000.0, ge=1, le=3_600_000)
    """Milliseconds after which a paused lane is due for a step. It makes the step after the steps
    under way.
    """
    slo: str | None = None
    """Targets in ms, like ttft:500,tpot:50. Layouts are compared by the share of requests that meet
    the targets, then by latency. Without targets they are compared by mean end-to-end latency.
    Default: none.
    """
    tbt_slo_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """Longest time in ms between two tokens of a request. While requests decode, a step takes only
    as many prompt tokens as its predicted time allows, and at least one KV block of them. Default:
    no limit.
    """
    max_waiting_requests: int = Field(default=10_000, ge=1, le=10_000_000)
    """Requests get 429 while this many wait. Urgent requests (`priority` below 0) count only each
    other. A stream gets 429 before its answer begins.
    """
    max_waiting_tokens: int = Field(default=4_000_000, ge=1, le=10_000_000_000)
    """Requests get 429 while prompts of this many tokens wait. The limit for urgent requests is
    twice this.
    """
    max_queue_wait_s: float | None = Field(default=None, gt=0, le=86_400)
    """Requests that would wait for more seconds get 429. The estimate is the rate at which
    others leave the queue. As many as --max-num-seqs may wait anyway. Half of the clients' timeout
    is a good value. Default: no limit.
    """
    priority_aging_s: float = Field(default=30.0, ge=1, le=86_400)
    """Seconds after which a waiting request is overdue. Every second request that begins is an
    overdue one, whatever its priority.
    """
    max_body_bytes: int = Field(default=2**24, ge=1024, le=2**40)
    """Longest body of a request in bytes; a longer one gets 413. Batches of prompts and embeddings
    may need more.
    """
    clients_may_set: tuple[Steering, ...] | None = None
    """Fields that clients may set in their requests, like priority,tp_degree. They change the
    layout or the order for all clients. Default: all; with an API key none, or priority beside
    --most-urgent-priority.
    """
    most_urgent_priority: int | None = Field(default=None, ge=-(2**63), le=0)
    """Requests with a `priority` below this get 400. Lower values are more urgent. The usual 0 is
    never refused. Default: no limit.
    """
    lend_blocks: int = Field(default=16, ge=1, le=1_000_000)
    """Fewest KV blocks that a group asks its engines for at a time."""
    lend_weights: bool = False
    """Lend memory of weights to the KV cache. While a request needs more KV than any group holds,
    the widest group frees weights that its engines hold twice. A switch to narrower groups first
    reads them back from a file in TMPDIR, which must be on a disk with room for the model's
    weights. The loss of an engine then ends the server. On CUDA it has not run.
    """
    token_parallel: bool = True
    """Let a group divide the tokens of a step instead of the weights. It does where its engines
    have measured at their start that such steps are shorter.
    """
    cuda_graphs: bool | None = None
    """On CUDA, capture decode steps of all lanes as CUDA graphs. Groups that exchange by staged or
    pynccl stay eager. At its start the server compares graphs, and code that vLLM compiles, with
    eager steps. Where they differ it goes on eagerly; with --cuda-graphs it ends. None of this has
    run on a GPU yet. Default: as vLLM.
    """
    cpu_collectives: Literal["shm", "gloo", "staged"] = "shm"
    """How engines on the CPU exchange data. `shm` is shared memory. `staged`, for tests, is `shm`
    with the copies of CUDA.
    """
    cuda_collectives: Literal["nccl", "pynccl", "staged"] | None = None
    """How engines on CUDA exchange data. With `pynccl`, NCCL in each group, a server survives the
    loss of an engine. `staged` goes through host memory, and is slow. Default: nccl, or staged
    where engines share a GPU.
    """
    engines_per_device: int = Field(default=1, ge=1, le=MAX_ENGINES)
    """Engines that share a GPU, for tests. The number has to divide --data-parallel-size. It needs
    --kv-cache-memory-bytes. On the CPU it changes nothing.
    """
    engine_timeout_s: float = Field(default=5.0, ge=0.5, le=3600)
    """Seconds without a sign of life after which an engine is killed, as lost. Where servers
    survive a loss: at most --collective-timeout-s.
    """
    collective_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds that an engine waits for the other engines of its group. With `nccl` it bounds no
    collective.
    """
    min_engines: int = Field(default=1, ge=1, le=MAX_ENGINES)
    """The server ends when fewer engines than this are left. Lost engines are started again. At
    most --data-parallel-size.
    """
    node_metrics: bool = False
    """In /metrics, show three of vLLM's gauges for all engines together. They are
    vllm:num_requests_running, vllm:num_requests_waiting and vllm:kv_cache_usage_perc, as routers
    between nodes read them.
    """
    trace_out: str | None = None
    """File for a trace of all steps and switches, for ui.perfetto.dev. The file is overwritten.
    Default: none.
    """

    @field_validator("slo")
    @classmethod
    def _targets(cls, value: str | None) -> str | None:
        if value is not None and parse_slo(value).e2el is not None:
            raise ValueError(
                "must be targets of ttft and tpot, in ms; layouts are compared by e2el anyway"
            )
        return value

    @field_validator("clients_may_set")
    @classmethod
    def _steering(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and "none" in value and len(value) > 1:
            raise ValueError("none cannot be combined with other fields")
        return value

    @property
    def slo_s(self) -> tuple[float, float]:
        """The targets of TTFT and TPOT in seconds, infinite where there is none."""
        slo = Slo() if self.slo is None else parse_slo(self.slo)
        return slo.targets_s

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


class SettingGroup(NamedTuple):
    """Settings for one task. `title`: a word that `--help=` takes. `fields`: of FlyingConfig."""

    title: str
    purpose: str
    fields: tuple[str, ...]


GROUPS = (
    SettingGroup(
        "Layout",
        "which engines step together, and the rule that decides",
        (
            *("group_sizes", "policy", "policy_dry_run", "horizon_s"),
            *("weave_steps", "max_pause_ms"),
        ),
    ),
    SettingGroup("Latency", "targets for requests", ("slo", "tbt_slo_ms")),
    SettingGroup(
        "Overload",
        "how much may wait, and what is refused",
        (
            *("max_waiting_requests", "max_waiting_tokens", "max_queue_wait_s"),
            *("priority_aging_s", "max_body_bytes"),
        ),
    ),
    SettingGroup(
        "Steering",
        "fields of requests that steer the server",
        ("clients_may_set", "most_urgent_priority"),
    ),
    SettingGroup(
        "Lending", "KV blocks and weights that engines lend", ("lend_blocks", "lend_weights")
    ),
    SettingGroup(
        "Execution",
        "how groups compute and exchange data",
        (
            *("token_parallel", "cuda_graphs", "cpu_collectives", "cuda_collectives"),
            "engines_per_device",
        ),
    ),
    SettingGroup(
        "Losses",
        "engines that end or freeze, and deadlines",
        ("engine_timeout_s", "collective_timeout_s", "min_engines"),
    ),
    SettingGroup("Observability", "metrics and traces", ("node_metrics", "trace_out")),
)


class Deployment(BaseModel):
    """Settings that a launch adds for its processes to find each other. Not set by users."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: str
    engines: Literal[1, 2, 4, 8]
    devices: int = Field(ge=1)
    """Devices per engine (vLLM's --tensor-parallel-size)."""
    group_sizes: tuple[int, ...]
    not_offered: dict[int, str] = {}
    """The reasons why the model does not admit some group sizes."""
    collectives: Collectives = "shm"
    """How the devices of a group exchange tensors."""
    survives: bool = False
    """True if the server goes on when it loses an engine."""
    incarnations: tuple[int | None, ...] = ()
    """Number of earlier starts of each engine, as this process knows it at its start; None: the
    engine is lost.
    """
    starts_alone: bool = False
    """True if this engine starts while others run, which take no part in its start."""
    async_groups: bool = False
    """True if groups schedule asynchronously, though vLLM turns it off for the platform."""
    eager_where_refused: bool = False
    """True if a lane is eager whose compiled code or CUDA graphs compute something else than eager
    steps; otherwise the start ends.
    """
    placements: tuple[Placement, ...] = ()
    """Placement of each device of each engine, engine 0's first, on the CPU; none on CUDA."""
    flying: FlyingConfig

    @property
    def one_world(self) -> bool:
        """True if all engines are in one torch world, and so none can do without the others."""
        return self.collectives in ONE_WORLD

    @property
    def captures_groups(self) -> bool:
        """True if CUDA graphs may hold the exchanges of groups: `staged` waits for the device, and
        `pynccl` replaces what a graph has captured.
        """
        return self.collectives == "nccl"

    def is_there(self, engine: int) -> bool:
        """Return whether an engine was there, as far as this process knew at its start."""
        return not self.incarnations or self.incarnations[engine] is not None

    def bind_process(self, engine: int, device: int) -> int | None:
        """Bind this process to the cores of a device of an engine, and log its placement.

        Returns the number of its OpenMP threads; None on CUDA, where no device has a placement.

        Raises:
            ConfigError: if the CPUs cannot be used any more.
        """
        if not self.placements:
            return None
        index = engine * self.devices + device
        placement = self.placements[index]
        placement.bind()
        logger.info("%s: %s", device_name(index, self.devices), placement)
        return placement.threads

    @property
    def told_in_s(self) -> float:
        """Seconds in which all engines know that one is lost or back.

        The API server has to find that an engine is silent. The API server may stand still for a
        while and go on, as when its machine does.
        """
        return max(self.flying.engine_timeout_s + TOLD_S, self.flying.collective_timeout_s)

    @property
    def widest(self) -> int:
        """Engines in the widest group."""
        return self.group_sizes[-1]

    @property
    def wider_sizes(self) -> tuple[int, ...]:
        """Group sizes beyond 1: a lane of each is built beside lane 1, which every engine has."""
        return self.group_sizes[1:]

    @property
    def lends(self) -> bool:
        """True if its widest group may lend the room of weights to KV."""
        return self.flying.lend_weights and self.widest > 1


def parse_flying(raw: dict[str, Any]) -> FlyingConfig:
    """Validate a user's settings. Raises ConfigError, naming field, value and what is allowed."""
    try:
        return FlyingConfig.model_validate(raw)
    except ValidationError as error:
        field, value, allowed = first_problem(FlyingConfig, error)
        raise ConfigError(f"{field or KEY}={value!r}: {allowed}") from None


def deployment_of(additional_config: dict[str, Any]) -> Deployment:
    """Return the deployment that the launcher put into vLLM's `additional_config`."""
    return Deployment.model_validate(additional_config[KEY])
