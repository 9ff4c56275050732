"""Why numbers differ from the paper's, by table, model and number; each was found by changing the
simulation.
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

_PROMPTS = (
    "the paper's times to first token here contradict those of its figure 8, 212 ms for static "
    "TP with the same "
    "lengths and load. Shorter prompts explain them: with up to 1,000 tokens static TP has 65 ms "
    "here, with up to "
    "1,700 static DP has 150."
)
_STALLED = (
    "decodes wait for the prompts in their steps. Of the 45.2 ms that the table had until stock's "
    "own router replaced ours here, 5 were of our placement of urgent requests. The paper has "
    "one number for urgent and other requests, as if there "
    "were none to wait for; with prompts up to 1,700 tokens static DP has 33.5 ms."
)
_QUEUE = (
    "the paper's mean of all is 34 times that of urgent requests, so its static TP had a queue. "
    "Ours has none at this "
    "load; with 64 requests per engine the mean is 0.23 s at 5 requests/s and 6.0 s at 6."
)
_LONG = (
    "time per token fits section 6.1's prompts (23.9 ms), times to first token fit shorter ones: "
    "no one length of "
    "prompts gives both."
)
_NO_WORK = (
    "ours waits for the step under way and for nothing else; the release drains before it switches."
)
_GAP_MIGRATE = (
    "KV comes along within 0.1 s; the gap is that of steps with 8,192 prompt tokens, which take "
    "0.6 to 0.9 s and give "
    "gaps of 0.9 s without any switch (`sequential`)."
)
_GAP_WEAVE = (
    "old and new requests share the engines until the old ones have ended, and a step with 8,192 "
    "prompt tokens takes "
    "0.6 to 0.9 s; without any switch such steps give gaps of 0.9 s already (`sequential`)."
)
_DEGREE = (
    "a prompt alone is divided almost perfectly in the model: 6.2, 3.4, 1.9 and 1.2 s for "
    "GPT-OSS-120B at degree 1, 2, "
    "4 and 8, 270, 137, 70 and 37 s for Nemotron-8B. The paper's ratio lies between those of "
    "degree 2 and 4; it says "
    "neither the degree nor what else ran."
)
_SEQS = (
    "one engine runs 256 requests and up to 660 are there, so static TP and Shift Parallelism "
    "wait for places. With "
    "1,024 static TP has 24.3 s and Shift Parallelism 13.5 s, ratios of 2.4 and 1.35; `auto` has "
    "the same as with 256."
)
_LLAMA_TPOT = (
    "the median request comes in a burst, where layouts differ little: kept for good, degree 2 "
    "and 4 have 90 and 94 "
    "ms, static DP 96, degree 8 111. Shift Parallelism, which `auto` cannot choose, has 84. At "
    "low load alone the "
    "ratio is 1.6."
)
_NEMOTRON_TPOT = (
    "the median request comes in a burst, which `auto` serves at degree 1 as static DP does: in "
    "the four bursts both "
    "have 34, 88, 32 and 20 ms. Between bursts the ratio is 1.1 to 1.9."
)
_WIDE = (
    "at this load `auto` stays at degree 8, so all requests are as fast as the urgent "
    "ones, not as with static DP."
)
_WIDER = (
    "at this load `auto` is at degree 8 for 78 % of the time and at degree 4 else, so all "
    "requests are nearly as fast "
    "as the urgent ones, not as with static DP."
)
_STATIC_TP = (
    "static TP's queue is longer than the paper's: the bursts that make static DP wait 2.15 s "
    "bring 43,000 tokens/s, "
    "three times static TP's peak."
)
_ON_ONE = (
    "`auto` leaves a prompt of 700,000 tokens and more on the engine where it began, which takes "
    "232 s, and serves one of 500,000 at degree 8 in 16.8 s. The rows of 5d10415 of 2026-11-25 had "
    "36.7 s. The policy has changed since; what in it does this was not looked for."
)
_SWITCHED = (
    "static TP's prompts are faster than in earlier rows, as the cost model has NVSwitch reduce "
    "large messages ([cost_model.md](cost_model.md)); `auto` serves these prompts apart, as static "
    "DP does."
)

_APART = (
    "in bursts `auto` is apart, and its P90 is static DP's: the ratio is that of the layouts as "
    "modelled, and no "
    "decision between them makes it larger."
)
_BEGIN = (
    "`auto` is together when a burst begins. Requests that arrive during the step under way wait "
    "longer than with "
    "static DP. No other system of the table has a lower mean than static DP."
)
_BEGIN_LLAMA = (
    "the objective is mean latency, and first tokens come later for it: while a second before "
    "the first token counted "
    "15 times the ratio was 1.03 ([policies.md](policies.md)). As with the other models, "
) + _BEGIN
_SHIFT = (
    "as modelled, Shift Parallelism divides the tokens of a prompt at no cost of its own, and so "
    "has first tokens "
    "sooner than static TP; in the paper its gain over Flying Serving is at most 4 %."
)
_SHIFT_PEAK = (
    "Shift Parallelism's peak as modelled is 2,700 tokens/s; that of the paper, 3,059 / "
    "1.22, is 2,510."
)
_COORDINATED = (
    "GPT-OSS-120B's group steps take 4.3 ms, 0.37 ms of it coordination: the 10th percentile of "
    "the least disturbed "
    "of 20 rounds. The median of all rounds, on busy CPUs, was 1.56 ms "
    "([results.md](../results.md), `coordination`). "
    "Without it the group's are as static TP's, and static DP's 1.86 times as long."
)

REASONS: dict[tuple[str, str, str], tuple[float, str]] = {
    ("table1", "4000", "static-tp: priority ttft ms"): (176, _PROMPTS),
    ("table1", "4000", "static-tp: ttft ms"): (175, _QUEUE),
    ("table1", "4000", "static-dp: tpot ms"): (43.7, _STALLED),
    ("table1", "4000", "static-dp: priority ttft ms"): (280, _PROMPTS),
    ("table1", "4000", "static-dp: ttft ms"): (302, _PROMPTS),
    ("table1", "4000", "auto: priority ttft ms"): (171, _PROMPTS),
    ("table1", "4000", "auto: ttft ms"): (188, _PROMPTS),
    ("table1", "1700", "static-tp: priority tpot ms"): (16.6, _LONG),
    ("table1", "1700", "static-tp: tpot ms"): (16.8, _LONG),
    ("table1", "1700", "static-tp: priority ttft ms"): (84.3, _PROMPTS),
    ("table1", "1700", "static-tp: ttft ms"): (85.3, _QUEUE),
    ("table2", "llama-3-70b", "auto: longest context (tokens)"): (
        1081152,
        "with half of the weights resident on each device, 1.99 M tokens need 152 GB per device; "
        "the paper's number is "
        "that of two engines of four devices each, next row.",
    ),
    ("table2", "llama-3-70b", "switch (ms)"): (
        26.2,
        "all of it is the rest of the step under way, of the last of four engines: steps take 15 "
        "ms together, 30 ms "
        "alone and up to 0.3 s with prompts; an idle server's switch takes 0.5 ms, one message.",
    ),
    ("table2", "llama-3-70b", "auto, engines of 4 devices"): (
        1951040,
        "2 % less: two engines of four devices that each hold all weights keep as much for "
        "activations and the rest as "
        "static TP 4, and the paper rounds to 0.1 M.",
    ),
    ("context", "all", "time between tokens, auto / static TP"): (1.095, _COORDINATED),
    ("context", "all", "time between tokens, static DP / auto"): (1.695, _COORDINATED),
    ("context", "llama-3-70b", "TTFT, static DP / auto"): (
        2.54,
        "8,128 tokens alone take 0.95 s at degree 2 and 0.36 at degree 8, of these 0.07 and 0.12 "
        "in all-reduces, and "
        "19 ms in the front end of both; the paper does not say what else ran.",
    ),
    ("context", "nemotron-8b", "prompt tokens/s, auto / static TP"): (
        0.84,
        "of four prompts of a million tokens `auto` begins two in groups of four devices, and 51 "
        "s later one in a "
        "group of eight, and their steps are woven; static TP computes one prompt after the other.",
    ),
    ("fig8", "llama-3-70b", "burst, mean TTFT, auto / static-dp"): (1.3, _BEGIN_LLAMA),
    ("fig8", "gpt-oss-120b", "burst, mean TTFT, auto / static-dp"): (1.0, _BEGIN),
    ("fig8", "nemotron-8b", "burst, mean TTFT, auto / static-dp"): (1.0, _BEGIN),
    ("fig8", "nemotron-8b", "burst, P90 TTFT, static-tp / auto"): (4.16, _APART),
    ("fig8", "nemotron-8b", "burst, P90 TTFT, shift-parallel / auto"): (2.94, _APART),
    (
        "fig8",
        "all",
        "low load, mean TTFT, auto / shift-parallel, the larger of Llama's and Nemotron's",
    ): (1.25, _SHIFT),
    ("fig9", "llama-3-70b", "peak tokens/s, auto / shift-parallel"): (1.1, _SHIFT_PEAK),
    ("fig9", "gpt-oss-120b", "median TPOT, static-dp / auto"): (
        1.14,
        "the median request comes in a burst, which `auto` serves apart, as static DP does.",
    ),
    ("context", "gpt-oss-120b", "TTFT, static DP / auto"): (5.1, _DEGREE),
    ("context", "llama-3-70b", "prompt tokens/s, auto / static TP"): (1.16, _SWITCHED),
    ("context", "gpt-oss-120b", "prompt tokens/s, auto / static TP"): (1.25, _SWITCHED),
    ("context", "all", "TTFT, auto / static TP"): (7.47, _ON_ONE),
    ("release_switches", "llama-3-70b", "migrate: DP to TP, new layout begins after (s)"): (
        0.175,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "migrate: TP to DP, new layout begins after (s)"): (
        0.231,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "migrate: longest gap between two tokens (s)"): (
        0.922,
        _GAP_MIGRATE,
    ),
    ("release_switches", "llama-3-70b", "weave: DP to TP, new layout begins after (s)"): (
        0.172,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "weave: TP to DP, new layout begins after (s)"): (
        0.225,
        _NO_WORK,
    ),
    ("release_switches", "llama-3-70b", "weave: longest gap between two tokens (s)"): (
        1.76,
        _GAP_WEAVE,
    ),
    ("fig8", "llama-3-70b", "burst, P90 TTFT, static-tp / auto"): (3.34, _SEQS),
    ("fig8", "llama-3-70b", "burst, P90 TTFT, shift-parallel / auto"): (2.34, _SEQS),
    ("fig8", "gpt-oss-120b", "burst, P90 TTFT, static-tp / auto"): (6.04, _STATIC_TP),
    ("fig9", "llama-3-70b", "median TPOT, static-dp / auto"): (1.1, _LLAMA_TPOT),
    ("fig9", "nemotron-8b", "median TPOT, static-dp / auto"): (1.0, _NEMOTRON_TPOT),
    ("table1", "4000", "auto: tpot ms"): (33.9, _STALLED),
    ("table1", "4000", "auto / static-dp: tpot ms"): (0.591, _WIDER),
    ("table1", "4000", "auto / static-dp: ttft ms"): (0.622, _WIDER),
    ("table1", "1700", "auto / static-dp: tpot ms"): (0.507, _WIDE),
    ("table1", "1700", "auto / static-dp: ttft ms"): (0.566, _WIDE),
    ("table1", "1700", "auto: priority tpot ms"): (17.0, _LONG),
    ("table1", "1700", "auto: tpot ms"): (17.0, _WIDE),
    ("table1", "1700", "auto: priority ttft ms"): (91.6, _PROMPTS),
    ("table1", "1700", "auto: ttft ms"): (87.8, _WIDE),
    ("context", "nemotron-8b", "TTFT, static DP / auto"): (1.0, _ON_ONE),
    ("fig9", "nemotron-8b", "peak tokens/s, auto / shift-parallel"): (
        2.23,
        "one engine runs 256 requests, so Shift Parallelism has an eighth of static DP's; with "
        "1,024 it has 20,200 "
        "tokens/s instead of 14,000, and the ratio would be 1.55.",
    ),
    ("fig9", "llama-3-70b", "peak tokens/s, auto / static-tp"): (
        1.34,
        "the paper's 1,507 tokens/s of static TP contradict the 2,530 of its table 1, which ours "
        "(2,250) is near.",
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
