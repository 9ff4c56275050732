"""Why numbers differ from the paper's, by table, model and number.

A reason rests on rows: of its own page, or of a page that it names. Where no row shows one, it says
that the cause was not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from experiments import dynaserve_reasons, gyges_reasons

if TYPE_CHECKING:
    from experiments.rows import Row

STALE = 0.1
"""A reason was found for one value of ours; if that has changed by more than this since, the table
says so.
"""

# ---- table 1

_SHORTER = (
    "the paper's times to first token here contradict those of its figure 8 with the same lengths "
    "and load. Shorter prompts agree better with them: the second part of this page has prompts of "
    "up to 1,700 tokens."
)
_QUEUE = (
    "the paper's static TP has 63 ms for urgent requests and 2,130 ms for all, so it had a queue. "
    "Ours has none at this load. *A load that presses* is one with which stock TP has a queue."
)
_LENGTHS = (
    "stock TP's time per token is the paper's with the longer prompts of the first table, and "
    "stock DP's time to first token with these: no one length of prompts gives both."
)
_WIDE = (
    "all requests of `auto` are nearly as fast as its urgent ones and as those of stock TP, and "
    "not as those of stock DP: it keeps wide groups at this load."
)

_DIVIDES = (
    "groups of ours divide the tokens of a long prompt, where the paper's divide weights: so "
    "`auto` has first tokens sooner than stock TP."
)

# ---- figures 8 and 9

_SEQS = (
    "one engine runs 256 requests at most, so nearly all of stock TP's and of Shift Parallelism's "
    "time to first token is in its queue. With `max_num_seqs` 1,024 the ratio is nearer to the "
    "paper's."
)
_DENSE = (
    "the ratio follows from `max_num_seqs`, which the paper does not state: with 256 it is above "
    "the paper's, with 1,024 below it."
)
_BEGIN = (
    "no other fixed layout of the table has a lower mean than stock DP, which is apart before a "
    "burst begins; `auto` switches. Which of its requests wait longer was not looked for."
)
_APART = (
    "`auto` has nearly stock DP's P90 TTFT, the least of all fixed layouts of the table: no "
    "choice among these layouts makes the ratio much larger."
)
_SHIFT = (
    "the widest group of ours divides the tokens of a prompt as Shift Parallelism does as it is "
    "modelled, so at low load both have nearly the same first tokens."
)
_ALIKE = (
    "over the whole load layouts differ little in median TPOT: no system of the table has half of "
    "stock DP's. At low load alone `auto` has less than six tenths of it."
)
_AS_DP = (
    "over the whole load the median of `auto` is stock DP's: most requests come in bursts "
    "([low_phases.md](low_phases.md) has the others), in which it has stock DP's times."
)
_CONTRADICTS = (
    "the paper's 1,507 tokens/s of static TP ([cost_model.md](cost_model.md)) contradict the "
    "2,530 of its table 1, which ours is near ([table1.md](table1.md))."
)
_SHIFT_PEAK = (
    "Shift Parallelism's peak as modelled is above that of the paper, which is 1,507 x 2.03 / "
    "1.22 tokens/s with its peak of static TP ([cost_model.md](cost_model.md))."
)
_EIGHTH = (
    "one engine runs 256 requests, so Shift Parallelism runs an eighth of what the eight engines "
    "of stock DP run. With `max_num_seqs` 1,024 the ratio is nearer to the paper's."
)

# ---- table 2

_RESIDENT = (
    "with this layout the paper's number needs more memory than a device has "
    "([settings.md](settings.md)). It is nearly that of two engines of four devices each, next "
    "row."
)
_ROUNDED = (
    "it is twice stock TP 4's, whose devices hold as many weights. The paper's number is 1.9 M, "
    "rounded."
)
_STEP_UNDER_WAY = (
    "the model has the rest of the step under way, of the last of four engines, and one message. "
    "The paper does not say under which load it measured."
)
_DIVIDED = (
    "in the model a prompt alone is divided over eight devices at little cost: stock TP has less "
    "than a fifth of stock DP's time. The paper does not say the degree of its group nor what "
    "else ran."
)
_SEVERAL = (
    "`auto` changes its layout while the prompts are computed (*layouts of `auto`*). It has fewer "
    "tokens/s than stock DP."
)
_SPLIT_FOUR = (
    "`auto` changes its layout while the prompts are computed (*layouts of `auto`*); stock TP "
    "computes one prompt after the other with all devices."
)
_AS_TP = (
    "GPT-OSS-120B's: `auto` has stock TP's steps here, so the ratio is that of stock DP to "
    "stock TP, which is below the paper's."
)

# ---- switches of the release

_NO_WORK = (
    "ours waits for the step under way and for nothing else; the release drains before it switches."
)
_GAP_MIGRATE = (
    "steps with prompts are as long: `sequential`, in which no request changes its layout, has "
    "nearly this gap at 1.5 requests/s (table below)."
)
_GAP_WEAVE = (
    "old and new requests share the engines until the old ones have ended. Steps with prompts "
    "alone give half of this gap: that of `sequential`, in which no request changes its layout, "
    "at 1.5 requests/s (table below)."
)

REASONS: dict[tuple[str, str, str], tuple[float, str]] = {
    ("table1", "4000", "stock-tp: priority ttft ms"): (157, _SHORTER),
    ("table1", "4000", "stock-tp: ttft ms"): (157, _QUEUE),
    ("table1", "4000", "stock-dp: priority ttft ms"): (314, _SHORTER),
    ("table1", "4000", "stock-dp: ttft ms"): (320, _SHORTER),
    ("table1", "4000", "auto: priority ttft ms"): (133, _SHORTER),
    ("table1", "4000", "auto: tpot ms"): (20.4, _WIDE),
    ("table1", "4000", "auto / stock-tp: priority ttft ms"): (0.847, _DIVIDES),
    ("table1", "4000", "auto / stock-dp: tpot ms"): (0.59, _WIDE),
    ("table1", "4000", "auto / stock-dp: ttft ms"): (0.417, _WIDE),
    ("table1", "1700", "stock-tp: priority tpot ms"): (15.5, _LENGTHS),
    ("table1", "1700", "stock-tp: tpot ms"): (15.6, _LENGTHS),
    ("table1", "1700", "stock-tp: priority ttft ms"): (78.1, _LENGTHS),
    ("table1", "1700", "stock-tp: ttft ms"): (79.4, _QUEUE),
    ("table1", "1700", "auto / stock-dp: tpot ms"): (0.547, _WIDE),
    ("table1", "1700", "auto / stock-dp: ttft ms"): (0.498, _WIDE),
    ("table1", "1700", "auto: priority tpot ms"): (15.5, _LENGTHS),
    ("table1", "1700", "auto: tpot ms"): (15.5, _WIDE),
    ("table1", "1700", "auto: ttft ms"): (78.2, _WIDE),
    ("fig8", "llama-3-70b", "burst, P90 TTFT, stock-tp / auto"): (2.36, _SEQS),
    ("fig8", "llama-3-70b", "burst, P90 TTFT, shift-parallel / auto"): (1.65, _SEQS),
    ("fig8", "gpt-oss-120b", "burst, mean TTFT, auto / stock-dp"): (1.03, _BEGIN),
    ("fig8", "nemotron-8b", "burst, mean TTFT, auto / stock-dp"): (1.05, _BEGIN),
    ("fig8", "gpt-oss-120b", "burst, P90 TTFT, stock-tp / auto"): (5.7, _DENSE),
    ("fig8", "nemotron-8b", "burst, P90 TTFT, shift-parallel / auto"): (3.01, _APART),
    (
        "fig8",
        "all",
        "low load, mean TTFT, auto / shift-parallel, the larger of Llama's and Nemotron's",
    ): (1.01, _SHIFT),
    ("fig9", "llama-3-70b", "median TPOT, stock-dp / auto"): (1.1, _ALIKE),
    ("fig9", "llama-3-70b", "peak tokens/s, auto / stock-tp"): (1.24, _CONTRADICTS),
    ("fig9", "llama-3-70b", "peak tokens/s, auto / shift-parallel"): (1.09, _SHIFT_PEAK),
    ("fig9", "gpt-oss-120b", "median TPOT, stock-dp / auto"): (1.02, _AS_DP),
    ("fig9", "nemotron-8b", "median TPOT, stock-dp / auto"): (0.999, _AS_DP),
    ("fig9", "nemotron-8b", "peak tokens/s, auto / shift-parallel"): (2.17, _EIGHTH),
    ("table2", "llama-3-70b", "auto: longest context (tokens)"): (1081152, _RESIDENT),
    ("table2", "llama-3-70b", "auto, engines of 4 devices"): (1951040, _ROUNDED),
    ("table2", "llama-3-70b", "switch (ms)"): (39.0, _STEP_UNDER_WAY),
    ("context", "llama-3-70b", "prompt tokens/s, auto / stock TP"): (1.27, _SEVERAL),
    ("context", "gpt-oss-120b", "TTFT, stock DP / auto"): (5.44, _DIVIDED),
    ("context", "gpt-oss-120b", "prompt tokens/s, auto / stock TP"): (1.1, _SEVERAL),
    ("context", "nemotron-8b", "TTFT, stock DP / auto"): (7.48, _DIVIDED),
    ("context", "nemotron-8b", "prompt tokens/s, auto / stock TP"): (0.956, _SPLIT_FOUR),
    ("context", "all", "time between tokens, stock DP / auto"): (1.76, _AS_TP),
    ("release_switches", "llama-3-70b", "migrate: DP to TP, new layout begins after (s)"): (
        0.344,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "migrate: TP to DP, new layout begins after (s)"): (
        0.299,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "migrate: longest gap between two tokens (s)"): (
        0.959,
        _GAP_MIGRATE,
    ),
    ("release_switches", "llama-3-70b", "weave: DP to TP, new layout begins after (s)"): (
        0.341,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "weave: TP to DP, new layout begins after (s)"): (
        0.243,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "weave: longest gap between two tokens (s)"): (
        1.78,
        _GAP_WEAVE,
    ),
}

REASONS.update(dynaserve_reasons.REASONS)
REASONS.update(gyges_reasons.REASONS)


def why(table: str, model: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with their reasons."""
    return [
        replace(row, why=_why(row.mean, *REASONS.get((table, model, row.name), (row.mean, ""))))
        for row in rows
    ]


def _why(ours: float, then: float, text: str) -> str:
    return (
        text if abs(ours - then) <= STALE * abs(then) else f"(found when ours was {then:g}) {text}"
    )
