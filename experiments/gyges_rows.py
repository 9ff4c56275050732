"""The paper's numbers of Gyges, and what ours is beside each."""

from __future__ import annotations

from collections.abc import Callable

from experiments.common import Kept, Numbers
from experiments.gyges_runs import FACTORS, ROUTES
from experiments.rows import Known, Row, by_construction, row

SEQUENCES = {1: 3840, 2: 42_240, 4: 123_392}
"""Table 1, K being 1,024."""
RATE = {1: 448, 2: 670, 4: 767}
TOTAL = {1: 1792, 2: 1340, 4: 767}
DEVICES = 4
PAGES: dict[str, tuple[float, float]] = {
    "GPT-OSS-120B, down": (1012.5, 253.125),
    "GPT-OSS-120B, gate and up": (2025, 506.25),
    "GPT-OSS-20B, down": (253.125, 63.28125),
    "GPT-OSS-20B, gate and up": (506.25, 126.5625),
    "Llama-3.1-70B, each": (224, 56),
    "Qwen2.5-32B, each": (135, 33.75),
}
"""Table 3, at degree 1 and 4."""
DERIVED = by_construction("derived: sizes, rates and calls of the driver; no request is served")
FITTED = by_construction(
    "fitted: the requests in flight, which the paper does not state, are those that give this "
    "number"
)
GAIN = (1.261, 1.392)
THROUGHPUT = (1.75, 6.57)
TTFT_LESS, TPOT_LESS, OVERLAP_LESS = 0.53, 0.74, 0.267
PRIVATE = " (private trace)"
OURS = ROUTES[0]
Part = Callable[[Numbers], float]
"""Takes a number from those of one run."""
Spec = tuple[str, float | tuple[float, float], Part, bool | None]
"""A derived number: its name, the paper's, ours, and whether more is better."""


def table1_rows(found: Kept) -> list[Row]:
    """Longest sequences, rates of one engine, and of all four devices."""
    rows = []
    for degree, tokens in SEQUENCES.items():
        whats = ("longest sequence (tokens)", "one instance (tokens/s)", "four devices (tokens/s)")
        papers = tokens, RATE[degree], TOTAL[degree]
        parts = (
            _degree(degree, "tokens"),
            _degree(degree, "rate"),
            _degree(degree, "rate", DEVICES / degree),
        )
        specs = [
            (f"TP{degree}: {what}", *rest, None)
            for what, *rest in zip(whats, papers, parts, strict=True)
        ]
        rows += _derived(found, *specs, known=FITTED if degree == 1 else DERIVED)  # type: ignore[arg-type]
    return rows


def _degree(degree: int, key: str, times: float = 1.0) -> Part:
    return lambda one: float(one["table1"][str(degree)][key]) * times


def table3_rows(found: Kept) -> list[Row]:
    """Pages of a tensor."""
    specs: list[Spec] = []
    for tensor, published in PAGES.items():
        for degree, paper in zip((1, 4), published, strict=True):
            part = lambda one, t=tensor, d=degree: one["pages"][t][str(d)]  # type: ignore[misc] # noqa: E731
            specs.append((f"{tensor}: degree {degree}", paper, part, None))
    return _derived(found, *specs)


def padding_rows(found: Kept) -> list[Row]:
    """What padding costs."""

    def padded(of: Callable[[list[float]], float]) -> Part:
        return lambda one: of([shares["padded"] for shares in one["padding"].values()])

    return _derived(
        found,
        ("padding, the most of the four models", 0.14, padded(max), False),
        ("padding, the least", 0.0, padded(min), None),
        ("feed-forward time with padding, longer by", 0.001, lambda one: one["ffn_longer"], False),
        ("feed-forward weights, share of all", 0.88, lambda one: one["weights"]["mlp_share"], None),
        (
            "copying weights, extra memory to degree 4 (GB)",
            15.58,
            lambda one: one["weights"]["quarter_gb"],
            None,
        ),
        (
            "copying weights, extra memory to degree 1 (GB)",
            62.34,
            lambda one: one["weights"]["all_gb"],
            None,
        ),
    )


def _of(key: str, name: str, times: float = 1.0) -> Part:
    return lambda one: float(one["transformation"][key][name]) * times


def _over(top: Part, bottom: Part) -> Part:
    return lambda one: top(one) / bottom(one)


def _less(this: Part, than: Part) -> Part:
    """By what share one is less than the other."""
    return lambda one: 1.0 - this(one) / than(one)


def kv_rows(found: Kept) -> list[Row]:
    """KV in place beside migrate and trim."""
    extra, trimmed = _of("extra_bytes", "in place"), _of("extra_bytes", "trimmed")
    apart, trimmed_s, beside = _of("apart_s", "kv"), _of("apart_s", "trimmed"), _of("taken_s", "kv")
    return _derived(
        found,
        ("extra memory, less than with trimming", 0.916, _less(extra, trimmed), True),
        ("extra memory (MB)", 70.0, _of("extra_bytes", "in place", 1e-6), False),
        ("extra memory with trimming / in place", 12.0, _over(trimmed, extra), None),
        ("time, not beside steps, less than with trimming", 0.61, _less(apart, trimmed_s), True),
        ("time, beside steps, less than with trimming", 0.86, _less(beside, trimmed_s), True),
        ("time with trimming / in place", 2.6, _over(trimmed_s, apart), None),
        (
            "one transformation, not beside steps (ms)",
            (522.0, 2240.0),
            _of("apart_s", "kv", 1e3),
            False,
        ),
    )


def weight_rows(found: Kept) -> list[Row]:
    """Weights lent with boundary pages that stay, beside a partial swap."""
    apart, swapped, beside = (
        _of("apart_s", "lend"),
        _of("apart_s", "swapped"),
        _of("taken_s", "lend"),
    )
    return _derived(
        found,
        (
            "time, not beside steps, less than with a swap",
            (0.189, 0.422),
            _less(apart, swapped),
            True,
        ),
        ("time, beside steps, less than with a swap", 0.676, _less(beside, swapped), True),
        ("with a swap (ms)", (611.0, 696.0), _of("apart_s", "swapped", 1e3), False),
    )


def step_rows(found: Kept) -> list[Row]:
    """Whole transformations."""
    all_layers, seesaw = _of("one_step_s", "up"), _of("apart_s", "seesaw")

    def one_layer(one: Numbers) -> float:
        return float(one["transformation"]["one_layer_s"] / one["transformation"]["step_s"])

    return _derived(
        found,
        ("a step that transforms one layer, longer by", 0.01, one_layer, False),
        ("all layers in one step, less than Seesaw", 0.972, _less(all_layers, seesaw), True),
        ("Seesaw's time / ours", 41.0, _over(seesaw, all_layers), True),
    )


def _derived(found: Kept, *specs: Spec, known: Known = DERIVED) -> list[Row]:
    """Rows of which nothing is random."""
    once = Kept(found.commit, found.seeds[:1])
    return [row(name, paper, once, of, higher, known) for name, paper, of, higher in specs]


def scheduler_rows(found: Kept) -> list[Row]:
    """Throughput beside routers that do not know of transformations."""

    def over(theirs: str, factor: int) -> Part:
        return lambda one: (
            _tokens(one["scheduler"][str(factor)], OURS)
            / _tokens(one["scheduler"][str(factor)], theirs)
        )

    rows = []
    for theirs in ("round robin", "least load"):
        for factor in FACTORS:
            name = f"gyges / {theirs}: tokens/s, {factor}x"
            part = over("gyges-" + theirs.replace(" ", "-"), factor)
            rows.append(row(name, GAIN if factor == 1 else None, found, part, True))
    return rows


def _tokens(runs: Numbers, name: str) -> float:
    return float(runs[name]["tokens_per_s"])


def end_to_end_rows(found: Kept) -> list[Row]:
    """Beside the paper's baselines, at the rate where ours is furthest ahead: the paper does not
    say at which.
    """

    def ratios(one: Numbers, key: str, system: str) -> list[float]:
        return [runs[OURS][key] / runs[system][key] for runs in one["trace"].values()]

    def most_less(key: str, system: str) -> Part:
        return lambda one: 1.0 - min(ratios(one, key, system))

    def most_over(system: str) -> Part:
        return lambda one: max(ratios(one, "tokens_per_s", system))

    specs: list[Spec] = []
    for system in ("loongserve", "loongserve-serial", "kunserve", "kunserve-serial"):
        specs += [
            (f"gyges / {system}: tokens/s", THROUGHPUT, most_over(system), True),
            (f"gyges: TTFT less than {system}'s", TTFT_LESS, most_less("ttft_s", system), True),
            (f"gyges: TPOT less than {system}'s", TPOT_LESS, most_less("tpot_s", system), True),
        ]
    specs.append(
        (
            "gyges: TTFT less than gyges-stopped's",
            OVERLAP_LESS,
            most_less("ttft_s", "gyges-stopped"),
            True,
        )
    )
    return [row(name + PRIVATE, paper, found, of, higher) for name, paper, of, higher in specs]
