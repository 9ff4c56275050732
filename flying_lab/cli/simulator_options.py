"""Options of `flying-serving simulate` beside the workload."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from flying_lab.bench.options import AsJson, SloOption
from flying_lab.sim.announced import Source
from flying_lab.sim.routing import RouterName
from flying_serving.config import FlyingConfig

SERVER = FlyingConfig()
"""A simulated server has the defaults of a live one."""


class SimulatorOptions(BaseModel):
    """The simulated machine and systems, and where results go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hardware: str = Field(
        description="Devices like h200x8, or a file that `flying-serving fit` wrote."
    )
    model: str | None = Field(
        default=None, description="A packaged model, like llama-3-70b, or a config.json."
    )
    policy: str = Field(
        default="auto,stock-dp,stock-tp",
        description="Systems to compare, with commas between; a wrong name lists them all.",
    )
    devices_per_engine: int | None = Field(
        default=None, ge=1, description="Devices per engine; default: as few as hold the model."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, ge=0.01, le=1.0, description="Share of device memory that the server may use."
    )
    nodes: int = Field(default=1, ge=1, le=1024, description="Servers, all alike, behind a router.")
    router: RouterName = Field(
        default="cache-aware",
        description="How it chooses a server: cache-aware, least-load or round-robin.",
    )
    prefix_caching: bool = Field(
        default=False,
        description="Keep computed prompts, which hash ids of the trace say are shared.",
    )
    max_num_seqs: int = Field(
        default=1024, ge=1, description="Requests per engine or group at a time."
    )
    max_num_batched_tokens: int = Field(default=8192, ge=1, description="Tokens per step.")
    horizon_s: float = Field(
        default=SERVER.horizon_s, ge=0.1, le=3600, description="How far ahead layouts are compared."
    )
    tbt_slo_ms: float | None = Field(
        default=None,
        gt=0,
        le=3_600_000,
        description="Longest time between two tokens, as that of `serve`.",
    )
    lend_weights: bool = Field(
        default=False, description="As that of `serve`; for systems that change their layout."
    )
    no_token_parallel: bool = Field(
        default=False, description="As that of `serve`; measured machines have none anyway."
    )
    lengths: Source | None = Field(
        default=None,
        description="What clients announce of outputs: exact, error-20, error-40 or production "
        "(nothing); by default they ask for as many tokens as they get.",
    )
    out: Path | None = Field(
        default=None, description="Directory for the same files as those of `bench --compare`."
    )
    slo: SloOption = None
    as_json: AsJson = False
