"""The demo's second part: a burst between two quiet phases, on emulated devices.

The same load is served by engines apart, by engines together, and by a server with policy `auto`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from flying_lab.bench import compare, switchlog
from flying_lab.bench.compare import ENDED, Compared
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import SWITCHES
from flying_lab.bench.report import load as reported
from flying_lab.bench.report import page
from flying_lab.bench.switchlog import LoggedSwitch
from flying_lab.demo import claims, load, phases
from flying_lab.demo.claims import Observed
from flying_lab.demo.server import Shown, problems
from flying_lab.errors import BenchError
from flying_lab.workload import files

PICTURE = "over_time"


def run(console: Console, models: Path, *, short: bool = False) -> Shown:
    """Serve the load with each policy and report the observations. KeyboardInterrupt if it was
    ended.

    `short`: with `auto` alone and without the end of the load, so that no latencies are compared.
    """
    names = (phases.AUTO,) if short else (*phases.FIXED, phases.AUTO)
    spans = load.SHORT_PHASES if short else load.PHASES
    options = BenchOptions(compare=names, token_ids=load.TOKEN_IDS)
    workload = load.workload(spans)
    out = Path(tempfile.mkdtemp(prefix="flying-demo-"))
    files.save(workload, out / "workload.jsonl")
    console.print(
        f"emulated devices: {load.DEVICES_TEXT}. Nothing is computed: a step lasts as long as a "
        "cost model says. Requests, engines and switches are real. The load:"
    )
    for span in spans:
        console.print(f"  {span.label}: {span.length_s:g} s at {span.rate_rps:g} requests/s")

    compared = compare.measure_each(options, load.server_args(models), workload, out, console)
    if compared.code == ENDED:
        raise KeyboardInterrupt
    wrong = [f"{name}: {problem}" for name in names for problem in problems(out / name)]
    if not wrong:
        wrong = report(console, compared, out)
    return Shown(wrong, list(compared.summaries.values()))


def report(console: Console, compared: Compared, out: Path) -> list[str]:
    """Show the phases, the switches of `auto`, one conclusion and the pictures' paths. Returns the
    claims that were missed.
    """
    switches = _switches(out)
    figures = phases.phases_of(compared.summaries)
    auto = compared.measured[phases.AUTO].results
    console.print(phases.table(figures))
    console.print(*phases.decisions(auto, switches), sep="\n", markup=False)
    is_compared = set(phases.FIXED) <= set(compared.summaries)
    observed = Observed(figures, len(switches))
    if is_compared:
        console.print(phases.conclusion(figures, switches))
        console.print(claims.aim_line(observed))

    systems = reported.comparison(out)
    drawn = page.pictures(systems, {PICTURE: out / f"{PICTURE}.png"})
    console.print("\na picture, and the report with all figures (emulated devices):")
    for path in [*drawn, page.write(systems, out)]:
        console.print(f"  {path}", soft_wrap=True, markup=False)
    checked = claims.CLAIMS if is_compared else claims.CLAIMS[:1]
    return claims.problems(observed, checked)


def _switches(out: Path) -> list[LoggedSwitch]:
    """Return the switches of `auto` while the load ran.

    Raises:
        BenchError: if there is no log of switches.
    """
    system = next(one for one in reported.comparison(out) if one.name == phases.AUTO)
    if system.log is None:
        raise BenchError(f"{out / phases.AUTO / SWITCHES}: there is no log of switches")
    return switchlog.during(system.log, system.results.run)
