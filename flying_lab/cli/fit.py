"""`flying-serving fit`: a live server's measured steps as hardware for `flying-serving
simulate`.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from flying_serving.cli.connection import Connection
from flying_serving.errors import ConfigError

Source = Annotated[
    str,
    typer.Argument(
        metavar="URL|FILE",
        help="A running server, or the output of `flying-serving status --json`.",
    ),
]
Frontend = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Time that the server adds to a first token outside of steps; not in the status.",
    ),
]
Key = Annotated[
    str,
    typer.Option(
        "--api-key", envvar="VLLM_API_KEY", help="The server's API key.", show_default=False
    ),
]
Out = Annotated[Path, typer.Option(help="File for the machine.")]


def fit(
    source: Source,
    out: Out = Path("machine.json"),
    frontend_ms: Frontend = 0.0,
    api_key: Key = "",
) -> None:
    """Describe a server to the simulator: the step times by group size that it measured, and its
    memory.
    """
    from flying_lab.sim.machine import from_status
    from flying_serving.predict.steps import FEW, SOME

    if source.startswith(("http://", "https://")):
        status = Connection(url=source, api_key=api_key).ask("GET", "/flying/status")
    else:
        try:
            status = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{source}: neither a URL nor a file with a server's status ({error})"
            ) from None
    machine = from_status(status, source, frontend_ms / 1e3)
    try:
        out.write_text(machine.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out={str(out)!r}: cannot be written ({error})") from None
    for size, cost in sorted(machine.step_cost.items()):
        typer.echo(
            f"group size {size}: {cost.fixed_s * 1e3:.2f} ms, {cost.prefill_token_s * 1e6:.1f} "
            "us per prompt token, "
            f"{cost.sequence_s * 1e6:.0f} us per request, {cost.context_token_s * 1e9:.1f} ns "
            "per token of context; "
            f"more for each of the first {FEW} tokens: {cost.few_token_s * 1e6:.1f} us, of {SOME}: "
            f"{cost.some_token_s * 1e6:.1f} us"
        )
    typer.echo(f"{out}: use it as `flying-serving simulate --hardware {out} ...`")
