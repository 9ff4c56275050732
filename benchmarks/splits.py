"""Split requests on emulated devices, planned with learned lengths: `split` beside `auto` and
`static-dp`.

python -m benchmarks.splits [--engines 2] [--rounds 3]

Two mixes in turn: long prompts with short outputs, and the reverse. Clients ask for MOST_TOKENS,
announce nothing, and leave when they have their tokens: so the server plans with what it has
learned. All servers run at once, and are stopped while another one is measured. Steps last
`slowdown` times as long as on the devices, and so do the load's times and the target. All times are
given as on the devices. The plan is in experiments/plans/dynaserve.md.
"""

from __future__ import annotations

import argparse
import itertools
import random
from dataclasses import dataclass

from benchmarks import flags
from benchmarks.client import Arrival, Stream, poisson, prompt, serve_arrivals
from benchmarks.emulated import served
from benchmarks.live_report import WHOLE
from benchmarks.rounds import BENCH, Rows, keep, rotated
from benchmarks.splits_report import TARGET_S, figures, in_devices_time, span_s, table
from benchmarks.systems import System, Systems
from flying_lab.emulation.command import profile
from flying_lab.signals import ended_by_signals

MODEL, DEVICE = "qwen2.5-14b", "a100"
SYSTEMS = ("static-dp", "auto", "split")
TURN_S, TURNS = 15.0, 4
MOST_TOKENS = 4096
"""Output tokens that clients ask for at most."""
FLAGS = ["--max-num-seqs=256", "--max-num-batched-tokens=2048", "--max-model-len=16384"]
SLOWDOWN = {2: 2.0, 4: 4.0}
"""By the number of engines: two cores serve them, the API server and the clients."""


@dataclass(frozen=True)
class Mix:
    """Requests of one kind: least and most tokens, uniform, and their rate for each engine."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    rate_rps: float


MIXES = {
    "long prompts": Mix((2000, 8000), (16, 128), 0.5),
    "long outputs": Mix((64, 512), (256, 768), 1.2),
}


@dataclass(frozen=True)
class Sent:
    """A request of a mix, in the devices' time."""

    mix: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    seed: int

    def arrival(self, slowdown: float) -> Arrival:
        """Return the request as its client sends it to slowed devices."""
        token_ids = prompt(self.prompt_tokens, self.seed)
        at_s = self.at_s * slowdown
        return Arrival(at_s, token_ids, MOST_TOKENS, leaves_after=self.output_tokens)


def load_of(engines: int, seed: int) -> list[Sent]:
    """Return the requests of a round: the mixes in turn."""
    draw = random.Random(seed)
    sent = []
    for turn, name in enumerate(itertools.islice(itertools.cycle(MIXES), TURNS)):
        mix = MIXES[name]
        for at_s in poisson(engines * mix.rate_rps, TURN_S, draw.getrandbits(32)):
            lengths = draw.randint(*mix.prompt_tokens), draw.randint(*mix.output_tokens)
            sent.append(Sent(name, turn * TURN_S + at_s, *lengths, draw.getrandbits(32)))
    return sent


def started(args: argparse.Namespace, name: str) -> System:
    """Start one server of this comparison."""
    devices = profile(
        {
            "hardware": f"{DEVICE}x{args.engines}",
            "model": MODEL,
            "devices_per_engine": 1,
            "execution": args.execution,
            "slowdown": args.slowdown,
        }
    )
    target = f"--tbt-slo-ms={TARGET_S * 1e3 * args.slowdown:g}"
    system = served(name, devices, *FLAGS, target, f"--policy={name}")
    print(name, f"ready in {system.ready_s:.0f} s", flush=True)
    return system


def measured(system: System, load: list[Sent], slowdown: float) -> dict[tuple[str, str], float]:
    """Serve a round's requests. Returns the figures by phase, and the splits of all."""
    before = system.ask("status")["splits"]
    streams = serve_arrivals(system.url, system.model, [one.arrival(slowdown) for one in load])
    after = system.ask("status")["splits"]
    there = [in_devices_time(stream, slowdown) for stream in streams]
    run_s = span_s(there)
    of_phase: dict[str, list[Stream]] = {name: [] for name in (*MIXES, WHOLE)}
    for one, stream in zip(load, there, strict=True):
        of_phase[one.mix].append(stream)
        of_phase[WHOLE].append(stream)
    found = {
        (phase, figure): value
        for phase, mine in of_phase.items()
        for figure, value in figures(mine, run_s).items()
    }
    done = {name: after[name] - before[name] for name in after}
    found[WHOLE, "split %"] = 100 * (done["prompt"] + done["output"]) / len(load)
    found[WHOLE, "planned again"] = done["replanned"]
    found[WHOLE, "moved"] = done["moved"]
    return found


def run(args: argparse.Namespace) -> Rows:
    """Return the rows of all rounds; after each system those so far are kept."""
    rows: Rows = {}
    with Systems() as systems:
        for name in args.systems:
            systems.start(started(args, name))
        for number in range(args.rounds):
            load = load_of(args.engines, args.seed + number)
            for name in rotated(args.systems, number):
                system = systems.all[name]
                system.resume()
                found = measured(system, load, args.slowdown)
                system.pause()
                for (phase, figure), value in found.items():
                    rows.setdefault((name, phase, figure), []).append(value)
                    print(number, name, f"{phase}: {figure} {value:.4g}", flush=True)
            keep(args.out, vars(args) | {"rounds": number + 1}, rows)
    return rows


def options() -> argparse.Namespace:
    """Return the command line's options; slowdown and file follow from the number of engines."""
    parser = flags.emulated(__doc__, SYSTEMS, 3, BENCH)
    parser.add_argument("--engines", type=int, choices=sorted(SLOWDOWN), default=2)
    parser.set_defaults(slowdown=None, out=None)
    args = parser.parse_args()
    args.slowdown = args.slowdown or SLOWDOWN[args.engines]
    args.out = args.out or BENCH / f"splits-{args.engines}.json"
    return args


def main() -> None:
    """Run the rounds, keep all rows, print the table."""
    args = options()
    rows = run(args)
    print(table(keep(args.out, vars(args), rows)))


if __name__ == "__main__":
    with ended_by_signals():
        main()
