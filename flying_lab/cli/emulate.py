"""`flying-serving emulate`: a server on devices that are not there."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict, Field

from flying_lab.sim.cost import Execution
from flying_serving.cli.flags import flags

Flags = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- FLAGS", help="Flags of `vllm serve`, and ours without --stock."),
]


class EmulatedDevices(BaseModel):
    """The devices that are not there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hardware: str = Field(description="Devices like h200x8: engines times devices of an engine.")
    model: str = Field(description="A packaged model, like llama-3-70b, or a config.json.")
    devices_per_engine: int | None = Field(
        default=None, ge=1, description="Devices per engine; default: as few as hold the model."
    )
    execution: Execution = Field(
        default="eager",
        description="Steps as they are served today (eager), or in CUDA graphs (graph).",
    )
    slowdown: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Let each step last this many times as long, for machines with few cores.",
    )
    stock: bool = Field(
        default=False, description="Start stock vLLM on the same devices, without our code."
    )
    folder: Path = Field(
        default=Path(".models"), description="Where the stand-in for the model is written."
    )


@flags
def emulate(devices: EmulatedDevices, more: Flags = None) -> None:
    """Start a server on devices that you do not have: real engines, whose steps last as long as
    the simulator says.

    Its tokens are drawn at random.
    """
    from flying_lab.emulation.command import run

    run(devices.model_dump(exclude={"stock", "folder"}), devices.folder, devices.stock, more or [])
