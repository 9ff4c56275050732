"""`flying-serving simulate`: what a server with this model and hardware would have done with this workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flying_serving.cli import bench
from flying_serving.cli.admin import app
from flying_serving.config import FlyingConfig

ModelName = Annotated[str | None, typer.Option(help="A packaged model, like llama-3-70b, or a config.json.")]
Hardware = Annotated[str, typer.Option(help="Devices like h200x8, or a file that `flying-serving fit` wrote.")]
PolicyNames = Annotated[str, typer.Option(help="Systems to compare, with commas between; a wrong name lists them all.")]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Devices per engine; default: as few as hold the model.", show_default=False)
]
Utilization = Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of device memory that the server may use.")]
Seqs = Annotated[int, typer.Option(min=1, help="Requests per engine or group at a time.")]
Batched = Annotated[int, typer.Option(min=1, help="Tokens per step.")]
Horizon = Annotated[float, typer.Option(min=0.1, max=3600, help="How far ahead layouts are compared.")]
TtftWeight = Annotated[float, typer.Option(min=1, max=1000, help="Worth of a second before the first token.")]
Out = Annotated[Path | None, typer.Option(help="Directory for requests (parquet), summaries (JSON) and figures.")]
SERVER = FlyingConfig()
"""A simulated server weighs as a live one does if nothing is said."""


@app.command()
def simulate(
    context: typer.Context,
    hardware: Hardware,
    model: ModelName = None,
    policy: PolicyNames = "auto,static-dp,static-tp",
    devices_per_engine: Devices = None,
    gpu_memory_utilization: Utilization = 0.9,
    max_num_seqs: Seqs = 1024,
    max_num_batched_tokens: Batched = 8192,
    horizon_s: Horizon = SERVER.horizon_s,
    ttft_weight: TtftWeight = SERVER.ttft_weight,
    out: Out = None,
    as_json: bench.AsJson = False,
    trace: bench.Trace = None,
    trace_format: bench.TraceFormat = None,
    sec_multiplier: bench.SecMultiplier = 1.0,
    hash_block_tokens: bench.HashBlock = 16,
    synth: bench.Synth = None,
    parameters: bench.Set = None,
    seed: bench.Seed = 0,
    window: bench.Window = None,
    limit: bench.Limit = None,
    time_scale: bench.TimeScale = 1.0,
    prompt_scale: bench.PromptScale = 1.0,
    output_scale: bench.OutputScale = 1.0,
    max_prompt_tokens: bench.MaxPrompt = None,
    max_output_tokens: bench.MaxOutput = None,
    priority_share: bench.PriorityShare = 0.0,
    priority: bench.Priority = -1,
    long_prompts: bench.LongPrompts = None,
    slo: bench.SloText = None,
) -> None:
    """Simulate servers with a model and devices that you do not have: the same controller, on a modelled cluster."""
    from flying_serving.cli import simulation as command

    given = context.params
    own = {name: given[name] for name in SIMULATOR}
    raise typer.Exit(command.main(own, {name: value for name, value in given.items() if name not in own}))


SIMULATOR = (
    "model",
    "hardware",
    "policy",
    "devices_per_engine",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "horizon_s",
    "ttft_weight",
    "out",
    "as_json",
)
