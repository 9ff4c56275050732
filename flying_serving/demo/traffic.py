"""The demo's second part: `flying-serving bench --compare` over a burst between two quiet phases."""

import shlex
import tempfile
from pathlib import Path

from rich.console import Console

from flying_serving.bench.compare import ENDED
from flying_serving.cli import bench  # noqa: F401 - adds its command
from flying_serving.cli.admin import app
from flying_serving.demo.server import ENGINES, FLAGS, problems
from flying_serving.testing.tiny import make_model

POLICIES = ("auto", "static-dp", "static-tp")
TRAFFIC = (
    "duration_s=40",
    "low_rate_rps=1",
    "burst_rate_rps=8",
    "low_s=15",
    "burst_s=10",
    "prompt_tokens=64:256",
    "output_tokens=16:48",
)


def run(console: Console, models: Path) -> list[str]:
    """Compare policy `auto` with both fixed layouts. Returns what was wrong; KeyboardInterrupt if it was ended."""
    model = make_model(models / "llama-75m", "llama-75m")
    out = Path(tempfile.mkdtemp(prefix="flying-demo-"))
    line = command_line(model, out)
    console.print(f"flying-serving {shlex.join(line)}", markup=False, soft_wrap=True)
    code = app(line, standalone_mode=False)
    if code == ENDED:
        raise KeyboardInterrupt
    wrong = [f"bench ended with code {code}"] if code else []
    return wrong + [f"{policy}: {problem}" for policy in POLICIES for problem in problems(out / policy)]


def command_line(model: Path, out: Path) -> list[str]:
    """The command line, without the name of the program."""
    line = ["bench", "--compare", ",".join(POLICIES), "--synth", "alternating", "--seed", "1"]
    line += [word for parameter in TRAFFIC for word in ("--set", parameter)]
    line += ["--token-ids", "300:7999", "--out", str(out)]
    return [*line, "--", str(model), f"--data-parallel-size={ENGINES}", *FLAGS]
