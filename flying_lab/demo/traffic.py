"""The demo's second part: the same load on engines apart, on engines together, and on a server that
decides itself.

The load is one long prompt at a time, then a burst of short requests, then long prompts again. All
engines together compute a long prompt sooner. Each group serves MAX_NUM_SEQS requests at a time, so
engines apart serve more at once.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flying_lab.bench import compare, servers, switchlog
from flying_lab.bench.compare import ENDED
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import SWITCHES
from flying_lab.demo import seen
from flying_lab.demo.server import ENGINES, FLAGS, Shown, problems
from flying_lab.errors import BenchError
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload import files
from flying_lab.workload.model import Request, Workload

MAX_NUM_SEQS = 4
"""Requests that a group serves at a time: --max-num-seqs."""
PAUSE_S = 4.0
"""The pause after the burst, in which its last requests end on the faster layout."""
OPTIONS = BenchOptions(compare=(*seen.FIXED, seen.AUTO), token_ids=(300, 7999))


@dataclass(frozen=True)
class Phase:
    """Equal requests, one each `every_s`; then nothing for `pause_s`."""

    name: str
    requests: int
    every_s: float
    prompt_tokens: int
    output_tokens: int
    pause_s: float = 0.0


PHASES = (
    Phase("quiet", 5, 2.2, 1500, 8),
    Phase("burst", 24 * ENGINES, 0.16 / ENGINES, 64, 32, PAUSE_S),
    Phase("quiet again", 6, 2.2, 1500, 8),
)


def run(console: Console, models: Path) -> Shown:
    """Serve the load three times and report the observations. KeyboardInterrupt if it was ended."""
    model = make_model(models / "llama-75m", "llama-75m")
    out = Path(tempfile.mkdtemp(prefix="flying-demo-"))
    load = workload(PHASES)
    files.save(load, out / "workload.jsonl")
    console.print(
        f"a group of any size serves {MAX_NUM_SEQS} requests at a time; the load:",
        *map(_told, PHASES),
        sep="\n",
    )
    size = f"--data-parallel-size={ENGINES}"
    args = servers.parse_server_args([str(model), size, *FLAGS, f"--max-num-seqs={MAX_NUM_SEQS}"])
    compared = compare.measure_each(OPTIONS, args, load, out, console)
    if compared.code == ENDED:
        raise KeyboardInterrupt
    names = OPTIONS.compare
    wrong = [f"{name}: {problem}" for name in names for problem in problems(out / name)]
    if not wrong:
        wrong += _tell(console, compared, out)
    console.print(f"results, logs and the load: {out}", soft_wrap=True)
    return Shown(wrong, list(compared.summaries.values()))


def workload(phases: tuple[Phase, ...]) -> Workload:
    """Return a workload of one phase after the other."""
    requests: list[Request] = []
    begin_s = 0.0
    for phase in phases:
        for number in range(phase.requests):
            at_s = begin_s + number * phase.every_s
            requests.append(
                Request(
                    len(requests), at_s, phase.prompt_tokens, phase.output_tokens, phase=phase.name
                )
            )
        begin_s += phase.requests * phase.every_s + phase.pause_s
    return Workload("demo", 1, tuple(requests), origin="flying_lab.demo")


def _told(phase: Phase) -> str:
    """Return a phase as a line of text."""
    tokens = f"{phase.prompt_tokens} prompt and {phase.output_tokens} output tokens"
    return f"  {phase.name}: {phase.requests} requests of {tokens}, one each {phase.every_s:g} s"


def _tell(console: Console, compared: compare.Compared, out: Path) -> list[str]:
    """Show the phases, the switches of `auto` and one conclusion. Returns the problems."""
    log = switchlog.load(out / seen.AUTO / SWITCHES)
    if log is None:
        raise BenchError(f"{out / seen.AUTO / SWITCHES}: there is no log of switches")
    phases = seen.phases_of(compared.summaries)
    auto = compared.measured[seen.AUTO].results
    console.print(seen.table(phases))
    console.print(*seen.strengths(phases), sep="\n")
    console.print(*seen.decisions(auto, log), sep="\n", markup=False)
    console.print(seen.conclusion(phases, log))
    return [] if log.switches else [f"{seen.AUTO} has not changed the layout once"]
