"""Published numbers and what the cost model says instead of each."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.fitting import replaced
from experiments.steady import Load, full, prefill_s, tpot_s, ttft_s
from flying_lab.sim import models
from flying_lab.sim.cost import LaneCost, Prefill
from flying_lab.sim.hardware import Hardware
from flying_lab.sim.memory import GPU_MEMORY_UTILIZATION, MAX_BATCHED_TOKENS, kv_pool_bytes

PATH = Path(__file__).parent / "data" / "published.json"
MAX_SEQUENCES = 1024
"""vLLM's default for a server on a device of at least 70 GiB that is no A100."""


@dataclass(frozen=True)
class Point:
    """One published number; `conditions` has what `predict` needs besides model, device and
    degree.
    """

    id: str
    role: str
    """fit, fit_others (for devices other than its own), not_fitted, conditions (its source does not
    state some, which were inferred from it), queueing (for the discrete-event simulator) or
    impossible (contradicts its own conditions).
    """
    kind: str
    value: float
    unit: str
    source: str
    hardware: str
    model: str
    degree: int
    conditions: dict[str, Any]


def read() -> list[Point]:
    """All published points."""
    fields = tuple(name for name in Point.__dataclass_fields__ if name != "conditions")
    rows = json.loads(PATH.read_text(encoding="utf-8"))
    return [
        Point(
            **{f: row[f] for f in fields},
            conditions={k: v for k, v in row.items() if k not in fields},
        )
        for row in rows
    ]


def predict(point: Point, hardware: Hardware, sequences: float = MAX_SEQUENCES) -> float:
    """What the cost model says.

    Args:
        point: the published number.
        hardware: the device it was measured on.
        sequences: requests that an engine decodes at once, of a point that does not state them; at
            most as many as its KV memory holds.
    """
    given = point.conditions
    model = models.load(point.model)
    if given.get("fp8"):
        model, hardware = _fp8(model, hardware)
    if point.kind == "capacity":
        tokens = kv_capacity_tokens(
            model,
            hardware,
            point.degree,
            given.get("resident_degree"),
            given["utilization"],
            given.get("activations"),
        )
        return tokens / given.get("sequences", 1)
    cost = LaneCost(model, hardware, point.degree, given.get("execution", "graph"))
    if point.kind == "decode_rate":
        return sequences / cost.step_s(sequences, sequences * given["context_tokens"])
    load = Load(
        given["prompt_tokens"],
        given["output_tokens"],
        given.get("chunk_tokens", MAX_BATCHED_TOKENS),
    )
    match point.kind:
        case (
            "decode_gap"
        ):  # Little's law says how many requests decode, from the published rate and gap
            decodes = given["rate_per_engine"] * load.output_tokens * point.value
            return cost.step_s(decodes, decodes * load.mean_context_tokens)
        case "tpot":
            return tpot_s(cost, load, given["rate_per_engine"])
        case "ttft":
            return ttft_s(cost, load, given["rate_per_engine"])
        case "closed_loop_tpot":
            return full(cost, load, given["sequences"]).tpot_s
        case "decode_step":
            decodes = given["sequences"]
            return cost.step_s(decodes, decodes * load.mean_context_tokens)
        case "batch_latency":
            return _batch_s(cost, load, given["sequences"])
        case "prefill_rate":
            return 1.0 / prefill_s(cost, load)
        case "prefill_ratio":
            against = LaneCost(model, hardware, given["against_degree"])
            return given["engines"] * _full_step_s(against, load) / _full_step_s(cost, load)
        case "all_reduce_share":
            return _all_reduces_s(cost, load) / _full_step_s(cost, load)
        case "worst_step":
            return _worst_step(cost, load, _sequences(cost, load, given, sequences))
        case "saturated_requests" | "saturated_total" | "saturated_output":
            tokens = {
                "requests": 1,
                "total": load.prompt_tokens + load.output_tokens,
                "output": load.output_tokens,
            }
            rate = full(cost, load, _sequences(cost, load, given, sequences)).requests_per_s
            return rate * given["engines"] * tokens[point.kind.removeprefix("saturated_")]
        case "saturated_ratio":
            against = LaneCost(model, hardware, given["against_degree"])
            rates = [
                full(c, load, _sequences(c, load, given, sequences)).requests_per_s
                for c in (cost, against)
            ]
            return rates[0] * given["engines"] / rates[1]
    raise ValueError(f"{point.id}: kind={point.kind!r}")


def _fp8(model: models.Model, hardware: Hardware) -> tuple[models.Model, Hardware]:
    """Weights of one byte, and products at twice the rate of bfloat16, which is the data sheet's
    ratio. Attention, all-reduces and the KV cache stay in bfloat16.
    """
    rate = 2.0 * hardware.coefficients.gemm_efficiency.value
    changed = replaced(hardware, {"gemm_efficiency": rate}, None, "twice that of bfloat16")
    return replace(model, linear_bytes=1.0), changed


def _batch_s(cost: LaneCost, load: Load, sequences: int) -> float:
    """A batch that starts at once: one step for all prompts, then one for each further token."""
    prefill = cost.step_s(0, 0, [(load.prompt_tokens, 0)] * sequences)
    contexts = range(load.prompt_tokens + 1, load.prompt_tokens + load.output_tokens)
    return prefill + sum(cost.step_s(sequences, sequences * context) for context in contexts)


def _prompts(load: Load) -> list[Prefill]:
    """As many whole prompts as a step computes."""
    return [(load.prompt_tokens, 0)] * (load.chunk_tokens // load.prompt_tokens)


def _full_step_s(cost: LaneCost, load: Load) -> float:
    return cost.step_s(0, 0, _prompts(load))


def _all_reduces_s(cost: LaneCost, load: Load) -> float:
    """All all-reduces of such a step: two of a layer, and that of the embedding."""
    tokens = sum(new for new, _ in _prompts(load))
    one_s = cost.all_reduce_s(tokens * cost.model.hidden * models.ACTIVATION_BYTES)
    return (2 * cost.model.layers + 1) * one_s


def _sequences(cost: LaneCost, load: Load, given: dict[str, Any], limit: float) -> float:
    """As many as the KV memory holds at their average length, at most the limit."""
    utilization = given.get("utilization", 0.9)
    capacity = kv_capacity_tokens(cost.model, cost.hardware, cost.degree, None, utilization)
    return min(
        given.get("max_sequences", MAX_SEQUENCES), limit, capacity / load.mean_context_tokens
    )


def _worst_step(cost: LaneCost, load: Load, sequences: float) -> float:
    """A step with the last full chunk of a prompt beside all decoding requests."""
    decodes = full(cost, load, sequences).sequences
    new = min(load.prompt_tokens, load.chunk_tokens - round(decodes))
    return cost.step_s(
        decodes, decodes * load.mean_context_tokens, ((new, load.prompt_tokens - new),)
    )


def kv_capacity_tokens(
    model: models.Model,
    hardware: Hardware,
    degree: int,
    resident_degree: int | None = None,
    utilization: float = GPU_MEMORY_UTILIZATION,
    activations: float | None = None,
) -> int:
    """Tokens that a group of `degree` devices holds when its engines pool their KV memory.

    Args:
        model: whose KV cache it is.
        hardware: the kind of device.
        degree: devices of the group.
        resident_degree: devices of one engine; None if the group is one engine (a static layout).
        utilization: see `kv_pool_bytes`.
        activations: see `kv_pool_bytes`.

    Raises:
        ConfigError: the weights leave no room.
    """
    pool = kv_pool_bytes(model, hardware, resident_degree or degree, utilization, activations)
    return int(pool / model.kv_bytes_per_token(degree))
