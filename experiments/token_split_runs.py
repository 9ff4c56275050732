"""The runs of the page of prompts that are split by tokens: experiments/plans/token_split.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from experiments.common import MAX_NUM_SEQS, MODELS, Numbers, Setting, machine
from flying_lab.sim.baselines.token_split import (
    TokenSplit,
    free_prompts,
    tensor_split,
    token_split,
    token_split_fused,
)
from flying_lab.sim.catalog import build
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import System
from flying_lab.sim.requests import Chunk, SimRequest, SimStep
from flying_lab.sim.run import simulate
from flying_lab.workload.synth import Poisson, synthesise

LOADS = (0.3, 0.5, 0.7)
"""Of the capacity of stock data parallelism."""
OUTPUTS: Mapping[str, tuple[int, int]] = {"short": (16, 128), "long": (256, 1024)}
LEAST_S, LEAST_REQUESTS = 60.0, 600
"""Arrivals of a run go on for the longer of the two."""
UNCOUNTED = 1 / 3
"""Share of a run's arrivals before those that count."""
ROUNDS = 4
"""Requests that capacity is found with, as a multiple of the number that may run."""
SHOWN_PROMPT = 2048
"""Tokens of the prompt whose time is taken apart."""
MANY = 10**9
"""Requests and prompt tokens that may wait."""
OPTIONS = Options(max_num_seqs=MAX_NUM_SEQS, keep_times=False)
Make = Callable[[Modelled, int, Options], System]


def _large(make: Make) -> Make:
    """A server whose lane has the step tokens of an engine for each engine."""

    def made(where: Modelled, devices: int, options: Options) -> System:
        step_tokens = options.max_num_batched_tokens * TokenSplit.of(where, devices).engines
        return make(where, devices, replace(options, max_num_batched_tokens=step_tokens))

    return made


PLANNED: Mapping[str, Make] = {
    "tensor-split": tensor_split,
    "token-split": token_split,
    "token-split-fused": token_split_fused,
}
"""Servers with a lane for prompts, and the bound of the one that splits tokens."""
ADDED: Mapping[str, Make] = {
    "token-split-large": _large(token_split),
    "token-split-fused-large": _large(token_split_fused),
    "free-prompts": free_prompts,
}
"""Systems that were added when the first results had been seen."""
LANES = {**PLANNED, **ADDED}
FIGURES = {
    "mean_ttft_s": "mean TTFT",
    "p90_ttft_s": "P90 TTFT",
    "mean_tpot_s": "mean TPOT",
    "p90_tpot_s": "P90 TPOT",
    "mean_e2e_s": "mean E2E",
    "p90_e2e_s": "P90 E2E",
}


@dataclass(frozen=True)
class Cell:
    """One load of one model."""

    model: str
    outputs: str
    load: float

    @property
    def name(self) -> str:
        """Under which its numbers are kept."""
        return f"{self.outputs} {self.load:g}"


CELLS = [Cell(model, outputs, load) for model in MODELS for outputs in OUTPUTS for load in LOADS]


def fixed_systems(model: str) -> list[str]:
    """Stock vLLM at each degree, and Shift Parallelism."""
    where = machine(model, Setting())
    wide = where.degrees(where.smallest_engine)[1:]
    return ["stock-dp", *(f"stock-tp{degree}" for degree in wide), "shift-parallel"]


def server(name: str, model: str, setting: Setting) -> System:
    """One of the systems on the paper's machine, which refuses no request."""
    where = machine(model, setting)
    make = LANES.get(name) or partial(build, name)
    system = make(where, where.smallest_engine, OPTIONS)
    limits = {"most_waiting": MANY, "most_waiting_tokens": MANY}
    return replace(system, settings=replace(system.settings, **limits))


def measure_model(model: str, setting: Setting) -> Numbers:
    """Everything of one model: a prompt's time, capacities, and each system in each cell."""
    capacities = {outputs: capacity_rps(model, outputs, setting) for outputs in OUTPUTS}
    return {
        "prompt": prompt_parts(model, setting),
        "capacity_rps": capacities,
        **{
            cell.name: {
                name: serve(name, cell, capacities[cell.outputs], setting)
                for name in (*fixed_systems(model), *LANES)
            }
            for cell in CELLS
            if cell.model == model
        },
    }


def capacity_rps(model: str, outputs: str, setting: Setting) -> float:
    """Requests per second of stock data parallelism that always has work."""
    system = server("stock-dp", model, setting)
    count = ROUNDS * system.shape.engines * MAX_NUM_SEQS
    shape = Poisson(requests=count, rate_rps=1e6, output_tokens=OUTPUTS[outputs])
    ended = simulate(system, synthesise(shape, setting.seed).requests).ended
    ends_s = sorted(request.end_s for request in ended)
    first, last = len(ends_s) // 5, 3 * len(ends_s) // 5
    return (last - first) / (ends_s[last] - ends_s[first])


def serve(name: str, cell: Cell, capacity: float, setting: Setting) -> Numbers:
    """The figures of one system in one cell."""
    rate_rps = cell.load * capacity
    duration_s = max(LEAST_S, LEAST_REQUESTS / rate_rps)
    shape = Poisson(duration_s=duration_s, rate_rps=rate_rps, output_tokens=OUTPUTS[cell.outputs])
    outcome = simulate(server(name, cell.model, setting), synthesise(shape, setting.seed).requests)
    begin_s = UNCOUNTED * duration_s
    counted = [request for request in outcome.ended if request.arrival_s >= begin_s]
    return {"requests": len(counted), "refused": len(outcome.refused), **figures(counted)}


def figures(requests: Sequence[SimRequest]) -> Numbers:
    """Mean and P90 of TTFT, TPOT and E2E."""
    times_s = {
        "ttft": [one.first_token_s - one.arrival_s for one in requests],
        "tpot": [(one.end_s - one.first_token_s) / (one.tokens - 1) for one in requests],
        "e2e": [one.end_s - one.arrival_s for one in requests],
    }
    found = {}
    for name, values in times_s.items():
        found[f"mean_{name}_s"] = float(np.mean(values))
        found[f"p90_{name}_s"] = float(np.percentile(values, 90))
    return found


def prompt_parts(model: str, setting: Setting) -> Numbers:
    """Milliseconds of a prompt's step in an engine, in the lanes, and of the parts of the lane that
    splits tokens; of a decode step at each degree.
    """
    where = machine(model, setting)
    split = TokenSplit.of(where, where.smallest_engine)
    prompt = SimStep([Chunk(SHOWN_PROMPT, 0)])
    decode = SimStep([], 1, SHOWN_PROMPT)
    engine, wide = where.step_time(split.base), where.step_time(split.degree)
    seconds = {
        "engine": engine(prompt),
        "tensor": wide(prompt),
        "token": split.prompt_s(prompt),
        "attention": split.heads.attention_s(0, 0, prompt.chunks),
        "all_to_all": split.all_to_all_s(SHOWN_PROMPT),
        "weights": split.weights_s(),
        "pull": split.migration().seconds(SHOWN_PROMPT),
        "engine_decode": engine(decode),
        "tensor_decode": wide(decode),
    }
    return {"engines": split.engines, **{name: value * 1e3 for name, value in seconds.items()}}
