"""`flying-serving bench`: replay a workload against a server and measure it."""

from typing import Annotated

import typer

from flying_lab.bench.options import BenchOptions, WorkloadOptions
from flying_serving.cli.flags import flags

Server = Annotated[
    list[str] | None, typer.Argument(metavar="-- MODEL FLAGS", help="Of servers to --compare.")
]


@flags
def bench(options: BenchOptions, workload: WorkloadOptions, server: Server = None) -> None:
    """Replay a workload against an OpenAI-compatible server, without waiting for answers, and
    measure it.
    """
    from flying_lab.bench import command

    raise typer.Exit(command.main(options, workload, server or []))
