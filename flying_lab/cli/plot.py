"""`flying-serving plot`: figures of the results of `flying-serving bench`."""

from pathlib import Path
from typing import Annotated

import typer

Results = Annotated[
    Path,
    typer.Argument(metavar="RESULTS_DIR", help="--out of a `bench`, of one server or of several."),
]
Out = Annotated[
    Path | None, typer.Option(help="Directory for the pictures; default: beside the results.")
]
Format = Annotated[str, typer.Option("--format", help="png, svg or pdf.")]


def plot(results: Results, out: Out = None, form: Format = "png") -> None:
    """Draw results: load, latencies and layout over time, bars, distributions, token gaps; and one
    page of all.
    """
    from flying_lab.bench.report.page import draw_all

    for path in draw_all(results, out, form):
        typer.echo(str(path))
