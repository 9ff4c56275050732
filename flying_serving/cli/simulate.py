"""`flying-serving simulate`: serve a workload on a modelled cluster."""

import typer

from flying_serving.bench.options import WorkloadOptions
from flying_serving.cli.admin import app
from flying_serving.cli.flags import flags
from flying_serving.cli.simulator_options import SimulatorOptions


@app.command()
@flags
def simulate(options: SimulatorOptions, workload: WorkloadOptions) -> None:
    """Simulate servers with a model and devices that you do not have: the same controller, on a modelled cluster."""
    from flying_serving.cli import simulation as command

    raise typer.Exit(command.main(options, workload))
