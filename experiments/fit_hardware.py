"""Fit the coefficients of every device, write them with their errors, and report the errors on
published points.

    python -m experiments.fit_hardware

Writes flying_lab/sim/data/hardware.json and docs/lab/results/cost_model.md. The order matters:
kernels on H100 and A100 from profiles, then what only a serving system shows (host time, effective
bandwidths) from published points.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import points, report
from experiments.common import commit, date
from experiments.fitting import Fit, fit, fit_line, replaced
from experiments.points import Point
from flying_lab.sim import models
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.hardware import RANKS, Hardware, load, parse_hardware

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
HARDWARE = ROOT / "flying_lab" / "sim" / "data" / "hardware.json"
TABLE = ROOT / "docs" / "lab" / "results" / "cost_model.md"

MIB = 2**20
SHEET = "NVIDIA data sheet, dense, one direction of NVLink; memory as nvidia-smi reports it"
SPECS = {
    "h100": (989.5e12, 3.35e12, 81559 * MIB, 450e9),
    "h200": (989.5e12, 4.8e12, 143771 * MIB, 450e9),
    "h20": (148e12, 4.0e12, 97871 * MIB, 450e9),
    "a100": (312e12, 2.039e12, 81920 * MIB, 300e9),
}
NVLS = {
    # Of NVLink in one direction, 450e9: NVIDIA's own number for nccl-tests, which counts bytes as a
    # ring moves them. A switch that reduces moves fewer, so this may exceed 1.
    8: (
        480e9 / 450e9,
        "NVIDIA/nccl-tests issue 212 and NVIDIA/nccl issue 1455: bus bandwidth of all-reduce on "
        "eight H100 with NVLink SHARP, 480 GB/s",
    ),
}
"""Hopper's large all-reduces that NVSwitch reduces: efficiency by ranks. With two to four ranks the
same sources have 365 to 370 GB/s, as without it.
"""
ATTENTION_START_S = 12e-6
"""Shortest decode attention that Vidur measured on A100 (data/profiling/a100/attention.csv, 32
tokens of context).
"""
ATTENTION_FLOPS = {
    # FlashAttention-3 forward at 4096 tokens, head size 128: 590 TFLOP/s; between 430 (512) and 621
    # (16384).
    "h100": (
        590e12 / 989.5e12,
        "pytorch/benchmark pull request 2391: FlashAttention-3 forward on H100, 4096 tokens",
    ),
    "a100": (0.615, "FlashAttention-2, arXiv 2307.08691: 50 to 73 % of peak on A100; the middle"),
}
VIDUR_MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "Qwen/Qwen-72B": "qwen-72b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
}
GEMMS = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")
SMALL = (
    "input_layernorm_ms",
    "attn_rope_ms",
    "post_attention_layernorm_ms",
    "mlp_act_ms",
    "add_ms",
)
START = {
    "gemm_efficiency": 0.7,
    "memory_efficiency": 0.8,
    "roofline_sharpness": 3.0,
    "gemm_overhead_s": 4e-6,
    "elementwise_efficiency": 0.5,
    "layer_overhead_s": 2e-5,
    "attention_flops_efficiency": 0.6,
    "attention_memory_efficiency": 0.6,
    "eager_layer_s": 2e-4,
    "step_overhead_s": 1e-3,
    "frontend_s": 1e-2,
    "reserve_bytes": 4e9,
}
HOST = ("eager_layer_s", "step_overhead_s", "frontend_s", "reserve_bytes")


def fitted(published: Sequence[Point]) -> dict[str, Hardware]:
    """Every device, fitted to profiles and to those of the published points that have the role for
    it.
    """
    devices = {name: _start(name) for name in SPECS}
    for name in ("h100", "a100"):
        devices[name] = _fit_kernels(name, devices[name])
    crowded = _fit_attention(devices["a100"], published, "fit_others")
    devices["a100"] = _fit_attention(devices["a100"], published, "fit")
    devices["h100"] = _inherit(devices["h100"], crowded, ("attention_memory_efficiency",))
    devices["h200"] = _fit_h200(_inherit(devices["h200"], devices["h100"]), published)
    devices["h100"] = _inherit(devices["h100"], devices["h200"], HOST)
    devices["a100"] = _inherit(devices["a100"], devices["h200"], HOST)
    devices["h20"] = _inherit(devices["h20"], devices["h200"])
    return devices


def main() -> None:
    """Fit, write, report."""
    argparse.ArgumentParser(
        "python -m experiments.fit_hardware",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    published = points.read()
    devices = fitted(published)
    HARDWARE.write_text(dump(devices), encoding="utf-8")
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    written = {name: load(name) for name in devices}  # rounded, as everyone else will read them
    TABLE.write_text(report.table(written, published, f"{commit()} of {date()}"), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))


def _start(name: str) -> Hardware:
    """Data sheet numbers, and coefficients to start from."""
    fields = ("peak_flops", "memory_bandwidth", "memory_bytes", "link_bandwidth")
    spec = {
        f: {"value": v, "fit_error": None, "source": SHEET}
        for f, v in zip(fields, SPECS[name], strict=True)
    }
    start = {
        n: {"value": v, "fit_error": None, "source": "start of the fit"} for n, v in START.items()
    }
    network = "a100_dgx" if name == "a100" else "h100_dgx"
    lines = {str(ranks): _fit_all_reduce(network, ranks, SPECS[name][3]) for ranks in RANKS}
    return parse_hardware(name, {"spec": spec, "coefficients": start, "all_reduce": lines}, "fit")


def _fit_all_reduce(network: str, ranks: int, link: float) -> dict[str, Any]:
    """Small messages: vLLM's kernel where it was measured. Large ones: Vidur's NCCL times from 1
    MiB, with the bandwidth of NVSwitch's own reduction where there is one.
    """
    rows = defaultdict(list)
    with (DATA / "all_reduce_ms.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["network"] == network and int(row["num_workers"]) == ranks:
                rows[row["source"]].append(
                    (float(row["size_bytes"]), float(row["all_reduce_ms"]) / 1e3)
                )
    nccl = rows.get("vidur", rows.get("vidur, one node", []))
    small = rows.get("vllm custom", [r for r in nccl if r[0] < MIB])
    large = [r for r in nccl if r[0] >= MIB]
    small_source = "vLLM's custom all-reduce on H100, sgl-project/sglang pull request 2904"
    if "vllm custom" not in rows:
        small_source = "microsoft/vidur, NCCL within one node, under 1 MiB"
    link_s = 2.0 * (ranks - 1) / ranks / link
    lines = {}
    for kind, data, source in (
        ("small", small, small_source),
        ("large", large, f"microsoft/vidur {network}, NCCL, from 1 MiB"),
    ):
        sizes, seconds = np.array(data).T
        latency, slope = fit_line(sizes * link_s, seconds)
        error = float(np.median(np.abs((latency + slope * sizes * link_s) / seconds - 1)))
        lines[kind] = {
            "latency_s": {"value": latency, "fit_error": round(error, 4), "source": source},
            "efficiency": {"value": 1 / slope, "fit_error": round(error, 4), "source": source},
        }
    if network == "h100_dgx" and ranks in NVLS:
        value, source = NVLS[ranks]
        lines["large"]["efficiency"] = {"value": value, "fit_error": None, "source": source}
    return lines


def _fit_kernels(name: str, device: Hardware) -> Hardware:
    """Products and small operators from Vidur's profiles."""
    with (DATA / "vidur_layer_ops_ms.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == name]
    cases = [(VIDUR_MODELS[r["model"]], int(r["tp"]), int(r["num_tokens"])) for r in rows]

    def lanes(candidate: Hardware) -> dict[tuple[str, int], LaneCost]:
        return {
            (m, d): LaneCost(models.load(m), candidate, d) for m, d in {case[:2] for case in cases}
        }

    def products(candidate: Hardware) -> list[float]:
        costs = lanes(candidate)
        return [second for m, d, n in cases for second in costs[m, d].gemm_times_s(n)]

    def small(candidate: Hardware) -> list[float]:
        costs = lanes(candidate)
        return [costs[m, d].elementwise_s(n) for m, d, n in cases]

    observed = [float(row[column]) / 1e3 for row in rows for column in GEMMS]
    names = ("gemm_efficiency", "memory_efficiency", "roofline_sharpness", "gemm_overhead_s")
    source = f"microsoft/vidur, {name} layer operators, {len(observed)} products"
    device = fit(device, names, observed, products, source).hardware
    observed = [sum(float(row[column]) for column in SMALL) / 1e3 for row in rows]
    source = (
        f"microsoft/vidur, {name} layer operators, {len(observed)} sums of the small "
        "operators of a layer"
    )
    result = fit(device, ("elementwise_efficiency", "layer_overhead_s"), observed, small, source)
    overhead = result.hardware.coefficients.layer_overhead_s
    started = {"layer_overhead_s": overhead.value + ATTENTION_START_S}
    device = replaced(
        result.hardware, started, overhead.fit_error, source + "; plus 12 us to start attention"
    )
    value, source = ATTENTION_FLOPS[name]
    return replaced(device, {"attention_flops_efficiency": value}, None, source)


def _fit_points(device: Hardware, names: Sequence[str], chosen: Sequence[Point]) -> Fit:
    def predict(candidate: Hardware) -> list[float]:
        return [points.predict(point, candidate) for point in chosen]

    source = f"published points used in a fit on {device.name}: {len(chosen)}"
    return fit(device, names, [point.value for point in chosen], predict, source)


def _fit_h200(device: Hardware, published: Sequence[Point]) -> Hardware:
    """What a serving system shows: effective bandwidth and host time, and the memory that is kept
    back.

    Steps that run as graphs come first: their sources state the batch, nothing waits, and their
    time is that of kernels and of the step's own host work. What eager mode adds, and the server
    before the engine, is then fitted to serving in eager mode.
    """
    chosen = [p for p in published if p.hardware == "h200" and p.role == "fit"]
    eager = [p for p in chosen if p.conditions.get("execution") == "eager"]
    graphs = [p for p in chosen if p.kind == "batch_latency"]
    capacity = [p for p in chosen if p.kind == "capacity"]
    for names, of in (
        (("memory_efficiency", "step_overhead_s"), graphs),
        (("eager_layer_s", "frontend_s"), eager),
        (("reserve_bytes",), capacity),
    ):
        device = _fit_points(device, names, of).hardware
    return device


def _fit_attention(device: Hardware, published: Sequence[Point], role: str) -> Hardware:
    """Decode attention on A100; the other devices take over what a full server shows of it
    (docs/design/simulator.md).
    """
    chosen = [p for p in published if p.hardware == "a100" and p.role == role]
    return _fit_points(device, ("attention_memory_efficiency",), chosen).hardware


def _inherit(device: Hardware, other: Hardware, names: Sequence[str] = tuple(START)) -> Hardware:
    """Take coefficients that nothing here determines for this device from another one."""
    for name in names:
        taken = getattr(other.coefficients, name)
        source = (
            taken.source
            if taken.source.startswith("as on")
            else f"as on {other.name}: {taken.source}"
        )
        device = replaced(device, {name: taken.value}, taken.fit_error, source)
    return device


def dump(devices: Mapping[str, Hardware]) -> str:
    """The file that the simulator reads; numbers of five digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {k: rounded(v) for k, v in value.items()}
        return value

    library = {
        name: rounded(device.model_dump(exclude={"name"}))
        for name, device in sorted(devices.items())
    }
    return json.dumps(library, indent=1) + "\n"


if __name__ == "__main__":
    main()
