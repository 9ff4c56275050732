"""`flying-serving simulate`: serve a workload on a modelled cluster."""

import typer

from flying_lab.bench.options import WorkloadOptions
from flying_lab.cli.simulator_options import SimulatorOptions
from flying_serving.cli.flags import flags


@flags
def simulate(options: SimulatorOptions, workload: WorkloadOptions) -> None:
    """Simulate servers with a model and devices that you do not have: the same controller, on a
    modelled cluster.
    """
    from flying_lab.cli import simulation as command

    raise typer.Exit(command.main(options, workload))
