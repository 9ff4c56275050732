"""The properties of a device: data sheet numbers and fitted coefficients, each with its error and
its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flying_serving.errors import ConfigError

RANKS = (2, 4, 8)
"""Sizes of tensor-parallel groups whose all-reduce is known."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Coefficient(_Data):
    """A number, how well it describes the measurements, and their source."""

    value: float = Field(gt=0, allow_inf_nan=False)
    fit_error: float | None = Field(ge=0, allow_inf_nan=False)
    """Median relative error of the values that were fitted with it; None for a number that was not
    fitted.
    """
    source: str = Field(min_length=10)


class Line(_Data):
    """Time of a collective: a latency, and its bytes at a share of the link's bandwidth."""

    latency_s: Coefficient
    efficiency: Coefficient
    """Of the bytes that a ring moves. Above 1 where the switch reduces, and so moves fewer."""


class AllReduce(_Data):
    """All-reduce of one group size: the faster of a kernel for small messages and one for large
    ones.
    """

    small: Line
    large: Line


class Spec(_Data):
    """Data sheet numbers of one device."""

    peak_flops: Coefficient
    """Dense bfloat16 operations per second."""
    memory_bandwidth: Coefficient
    """Bytes of device memory that are read or written per second."""
    memory_bytes: Coefficient
    link_bandwidth: Coefficient
    """Bytes per second and direction, to all other devices together."""


class Coefficients(_Data):
    """Named, fitted coefficients of one device; docs/design/simulator.md explains each."""

    gemm_efficiency: Coefficient
    memory_efficiency: Coefficient
    roofline_sharpness: Coefficient
    gemm_overhead_s: Coefficient
    elementwise_efficiency: Coefficient
    layer_overhead_s: Coefficient
    attention_flops_efficiency: Coefficient
    attention_memory_efficiency: Coefficient
    eager_layer_s: Coefficient
    step_overhead_s: Coefficient
    frontend_s: Coefficient
    reserve_bytes: Coefficient


class Hardware(_Data):
    """The numbers of one kind of device."""

    name: str
    spec: Spec
    coefficients: Coefficients
    all_reduce: Mapping[int, AllReduce]
    """The lines of all-reduce by number of ranks."""

    @model_validator(mode="after")
    def _all_ranks(self) -> Hardware:
        if sorted(self.all_reduce) != list(RANKS):
            raise ValueError(
                f"all_reduce: must have exactly the ranks {list(RANKS)}, has "
                f"{sorted(self.all_reduce)}"
            )
        return self


@dataclass(frozen=True)
class Devices:
    """A node: a number of devices of one kind."""

    hardware: Hardware
    count: int


def names() -> list[str]:
    """Return the names of the kinds of device that are known."""
    return sorted(_read(None))


def load(name: str, path: Path | None = None) -> Hardware:
    """Load one kind of device, from the packaged data or from a file of the same form.

    Raises:
        ConfigError: the name is unknown, or its data is not complete; names the field.
    """
    library = _read(path)
    if name not in library:
        raise ConfigError(f"hardware={name!r}: not one of {', '.join(sorted(library))}")
    return parse_hardware(name, library[name], str(path or "packaged hardware.json"))


def parse_hardware(name: str, data: Mapping[str, Any], where: str) -> Hardware:
    """Check that every number of one device is there.

    Raises:
        ConfigError: names each field that is missing, unknown or out of range.
    """
    try:
        return Hardware.model_validate({"name": name, **data})
    except ValidationError as error:
        raise ConfigError(f"{where}: {name}: {problems(error)}") from error


def problems(error: ValidationError) -> str:
    """Return every field that is wrong, and why."""
    return "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()
    )


def parse_devices(text: str) -> Devices:
    """Read a name like `h200x8`, or `h200` for one device.

    Raises:
        ConfigError: an unknown device, or no count of at least 1.
    """
    match = re.fullmatch(r"([a-z0-9.-]+?)(?:x([0-9]+))?", text.strip().lower())
    kind, count = (match[1], int(match[2] or 1)) if match else (text, 1)
    if count < 1:
        raise ConfigError(f"hardware={text!r}: the number of devices must be at least 1")
    known = names()
    if kind not in known:
        examples = ", ".join(f"{name}x8" for name in known)
        raise ConfigError(
            f"hardware={text!r}: no such device {kind!r}; there are {examples}, with any count"
        )
    return Devices(load(kind), count)


def _read(path: Path | None) -> dict[str, Any]:
    source = path or files("flying_lab.sim").joinpath("data", "hardware.json")
    try:
        library: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"hardware file {source}: {error}") from error
    return library
