"""`flying-serving plot`: figures and the page of results that lie in a directory."""

from __future__ import annotations

from pathlib import Path

from flying_serving.bench.report import load, page
from flying_serving.bench.report.style import styled
from flying_serving.errors import ConfigError

FORMATS = ("png", "svg", "pdf")


def main(path: Path, out: Path | None, form: str) -> list[Path]:
    """Draw everything. Returns the files that were written.

    Args:
        path: what `flying-serving bench` wrote, of one server or of several.
        out: where the files go; by default beside the results.
        form: one of FORMATS.

    Raises:
        ConfigError: if the format is unknown or files cannot be written.
        BenchError: if there are no results.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format={form!r}: one of {', '.join(FORMATS)}")
    systems = load.comparison(path)
    directory = out or path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [*_pictures(systems, directory, form), page.write(systems, directory)]
    except OSError as error:
        raise ConfigError(f"--out={str(directory)!r}: {error.strerror}") from None


@styled
def _pictures(systems: list[load.MeasuredSystem], directory: Path, form: str) -> list[Path]:
    written = []
    for name, (draw, _) in page.FIGURES.items():
        figure = draw(systems)
        if figure is not None:
            written.append(directory / f"{name}.{form}")
            figure.savefig(written[-1])
    return written
