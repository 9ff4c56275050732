"""Numbers of the page about Gyges for which no request is served: memory, pages, and what a
transformation takes.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

from experiments.common import Numbers
from experiments.gyges_runs import ACTIVATIONS_BYTES, machine
from experiments.points import predict, read
from experiments.report import matching
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.hardware import load
from flying_lab.sim.memory import group_tokens, kv_pool_bytes
from flying_lab.sim.padding import PAGE_BYTES, PagedUnits, packed, padded
from flying_lab.sim.transformation import CHUNK_BYTES, Transformation, Work
from flying_serving.layout.shards import Segment

DEGREES = (1, 2, 4)
SEQUENCES = 8
"""Longest sequences at once that table 1's numbers fit: docs/lab/results/settings.md."""
OCCUPANCY = 0.9
CONTEXT_TOKENS = 1024
BFLOAT16 = 2
MLP: dict[str, dict[str, tuple[int, int]]] = {
    "GPT-OSS-120B": {"down": (2880, 2880 * 128), "gate and up": (2880, 2 * 2880 * 128)},
    "GPT-OSS-20B": {"down": (2880, 2880 * 32), "gate and up": (2880, 2 * 2880 * 32)},
    "Llama-3.1-70B": {"each": (8192, 28672)},
    "Qwen2.5-32B": {"each": (5120, 27648)},
}
"""Table 3: hidden size, and rows of that size in a tensor."""
SERVED = {
    "Llama2-7B": (4096, 11008),
    "Llama3-8B": (4096, 14336),
    "Qwen2.5-32B": (5120, 27648),
    "Qwen3-32B": (5120, 25600),
}
"""Table 4."""


def table1() -> Numbers:
    """Longest sequences and rates by degree; the rates at as many sequences as give the paper's at
    degree 1.
    """
    published = read()
    points = {point.id: point for point in published}
    devices = {"h20": load("h20")}
    sequences = matching(devices, published, "gyges-tp1-rate")
    found = {}
    for degree in DEGREES:
        tokens, rate = points[f"gyges-tp{degree}-max-sequence"], points[f"gyges-tp{degree}-rate"]
        found[str(degree)] = {
            "tokens": predict(tokens, devices["h20"]),
            "rate": predict(rate, devices["h20"], sequences),
        }
    return found


def lending() -> Numbers:
    """Longest sequences by degree of a group of engines of one device, by what is lent."""
    model, device = machine().model, machine().kind.hardware
    pool = kv_pool_bytes(model, device, 1, activations=ACTIVATIONS_BYTES)
    return {
        lent: {
            str(degree): group_tokens(model, pool, 1, degree, lent) / SEQUENCES
            for degree in DEGREES
        }  # type: ignore[arg-type]
        for lent in ("nothing", "mlp", "all")
    }


def pages() -> Numbers:
    """Pages of a tensor, at degree 1 and 4."""
    found: Numbers = {}
    for name, tensors in MLP.items():
        for tensor, (hidden, rows) in tensors.items():
            laid = packed(Segment(rows, 4), hidden * BFLOAT16)
            found[f"{name}, {tensor}"] = {
                "1": laid.weight_bytes / PAGE_BYTES,
                "4": laid.unit_bytes / PAGE_BYTES,
            }
    return found


def padding() -> Numbers:
    """By model, shares of feed-forward weights: what stays beside kept units (mean and worst rank),
    what is padded.
    """
    found: Numbers = {}
    for name, (hidden, rows) in SERVED.items():
        close, apart = (lay(Segment(rows, 4), hidden * BFLOAT16) for lay in (packed, padded))
        shares = [close.stranded_bytes([unit]) / close.weight_bytes for unit in range(4)]
        found[name] = {
            "stranded": mean(shares),
            "worst": max(shares),
            "padded": apart.padding_bytes / apart.weight_bytes,
        }
    return found


def transformation() -> Numbers:
    """Four engines of one device become one of degree 4, with 90 % of their KV memory in use."""
    where = machine()
    way = Transformation(where.model, where.kind.hardware, 1, 4)
    tokens = OCCUPANCY * (where.engine(1, (1,), 1).blocks - 1) * 16
    sequences = int(tokens / CONTEXT_TOKENS)
    step_s = LaneCost(where.model, where.kind.hardware, 1).step_s(
        sequences, sequences * CONTEXT_TOKENS
    )
    kv, trimmed = way.kv(tokens), way.kv_trimmed(tokens)
    lend, swapped = way.lend(), way.lend_swapped(_fragment_bytes())
    up, seesaw = kv + lend, way.through_host(tokens, 4)
    back = way.kv(tokens) + way.give_back("mlp")
    layer = _part(up, where.model.layers)
    works = {
        "kv": kv,
        "trimmed": trimmed,
        "lend": lend,
        "swapped": swapped,
        "up": up,
        "back": back,
        "seesaw": seesaw,
    }
    return {
        "step_s": step_s,
        "extra_bytes": {"in place": CHUNK_BYTES, "trimmed": trimmed.received_bytes},
        "apart_s": {name: way.apart_s(work) for name, work in works.items()},
        "taken_s": {name: way.taken_s(work) for name, work in works.items()},
        "one_step_s": {name: way.beside_s(work, step_s) for name, work in works.items()},
        "one_layer_s": way.beside_s(layer, step_s),
        "layers_in_one_percent": _most_layers(way, up, step_s),
        "up_delay_s": way.staggered(up).delay_s,
        "back_delay_s": way.staggered(back).delay_s,
    }


def _fragment_bytes() -> float:
    """Of a tensor of Qwen2.5-32B, what a partial swap copies: the bytes beside kept ones, mean of
    the ranks.
    """
    hidden, rows = SERVED["Qwen2.5-32B"]
    laid: PagedUnits = packed(Segment(rows, 4), hidden * BFLOAT16)
    return mean(laid.stranded_bytes([unit]) for unit in range(4))


def _part(work: Work, layers: float) -> Work:
    """One of so many parts."""
    fields = ("remaps", "rounds", "received_bytes", "copied_bytes", "copies", "host_bytes")
    return Work(*(getattr(work, field) / layers for field in fields))


def _most_layers(way: Transformation, work: Work, step_s: float) -> int:
    """As many as a step can transform and be at most 1 % longer."""
    layers = way.model.layers
    able = [
        n
        for n in range(1, layers + 1)
        if way.beside_s(_part(work, layers / n), step_s) <= 0.01 * step_s
    ]
    return max(able, default=0)


def weights() -> Numbers:
    """Gigabytes of all weights, of a quarter of them, and the share of feed-forward ones."""
    model = machine().model
    return {
        "all_gb": model.weight_bytes(1) / 1e9,
        "quarter_gb": model.weight_bytes(4) / 1e9,
        "mlp_share": model.mlp_bytes(1) / model.weight_bytes(1),
    }


def ffn_longer() -> float:
    """By how much Qwen2.5-32B's feed-forward products take longer with padding, while SEQUENCES
    requests decode.
    """
    where = machine()
    wider = round(where.model.intermediate * (1 + padding()["Qwen2.5-32B"]["padded"]))
    models = where.model, replace(where.model, intermediate=wider)
    plain_s, padded_s = (
        sum(LaneCost(one, where.kind.hardware, 1).gemm_times_s(SEQUENCES)[-2:]) for one in models
    )
    return padded_s / plain_s - 1.0
