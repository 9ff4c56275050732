"""Why numbers differ from DynaServe's: what the rows of the page show."""

from __future__ import annotations

_HANDOFF = (
    "one gap in 31 is the handoff, so this is its time. Ours pulls KV behind the computation and "
    "waits for the last chunk only ([settings.md](settings.md))."
)
_ALMOST_FULL = (
    "the paper's rate saturates its server, and ours with two of the seeds: the third is one end "
    "of the range."
)
_IN_FLIGHT = (
    "at 2,048 tokens a step the model's full server is as far above the paper's in the cost "
    "model's table (`dynaserve-p2048-d512-rate` in [cost_model.md](cost_model.md), which says "
    "more)."
)
_PREEMPTED = (
    "as in vLLM 0.32, a request that has come with its KV begins before one that was preempted. "
    "So the decoding engine computes few prompts again. No row shows how much of the difference "
    "this makes."
)
_KV = (
    "the paper's KV memory is 95 % full with 101 to 125 requests of 952 tokens in flight, as if "
    "it held 125,000 tokens; ours holds 1.7 times as many. How much of the difference that is has "
    "no row."
)
_NOT_FULL = (
    "the paper's rate saturates its server and not ours, which sustains more (above), so fewer "
    "requests are in flight."
)
_CHUNKS = (
    "colocated serving tuned to the best chunk meets the target too, and so does *colocated to "
    "the target*, our batches without any split, at the same rate: nothing is left for a split to "
    "gain."
)
_MEAN = (
    "split sustains more than tuned colocated serving on arXiv alone, about as much on two, "
    "and less on Mini Reasoning."
)
_DECODES = (
    "our server keeps a request waiting until a group has KV memory for its whole expected "
    "output, and stock vLLM until it has memory for the prompt. So split runs fewer requests at "
    "once, and too many wait; it preempts none. Without that rule (`Limits.capped` off, first "
    "seed, no row) it sustained as much as colocated serving. Rows of before 1da1b214, of another "
    "splitter, had 1."
)
_TUNED = (
    "colocated serving is tuned to the chunk with which it sustains most, and meets the target. "
    "The text that we have of the paper does not give the chunk of its own."
)
_HYBRID_DISAGG = (
    "here disaggregated serving sustains less than in the paper and split more: one engine "
    "computes all prompts and the other all outputs, and at most 5 % of requests may wait for "
    "long. The paper does not say that its queues were bounded."
)
_HIDDEN = (
    "all splits of these rows are inside prompts of one chunk, of which nothing can be pulled "
    "earlier, so both ways wait equally long. Rows of before 1da1b214, of another splitter, had a "
    "fourth hidden."
)

REASONS: dict[tuple[str, str, str], tuple[float, str]] = {
    ("dynaserve", "table1", "P8192-D32, disaggregated: p99_ms"): (24.8, _HANDOFF),
    ("dynaserve", "table1", "P8192-D32, colocated: p50_ms"): (221, _ALMOST_FULL),
    ("dynaserve", "table1", "P8192-D32, colocated: attainment"): (0.213, _ALMOST_FULL),
    ("dynaserve", "table1", "P2048-D512, colocated: rps"): (3.43, _IN_FLIGHT),
    ("dynaserve", "table1", "P2048-D512, disaggregated: rps"): (3.2, _PREEMPTED),
    ("dynaserve", "table1", "P219-D1467, disaggregated: rps"): (4.72, _KV),
    ("dynaserve", "table1", "P219-D1467, disaggregated: p99_ms"): (44.7, _NOT_FULL),
    ("dynaserve", "table1", "P219-D1467, colocated: rps"): (4.9, _KV),
    ("dynaserve", "table1", "P219-D1467, colocated: p50_ms"): (36.8, _NOT_FULL),
    ("dynaserve", "table1", "P219-D1467, colocated: p99_ms"): (61.6, _NOT_FULL),
    ("dynaserve", "capacity", "BurstGPT: split / colocated"): (1, _CHUNKS),
    ("dynaserve", "capacity", "Azure Code: split / colocated"): (1.03, _CHUNKS),
    ("dynaserve", "capacity", "Mini Reasoning: split / colocated"): (0.703, _DECODES),
    ("dynaserve", "capacity", "mean of the four: split / colocated"): (0.992, _MEAN),
    ("dynaserve", "goodput", "most of the four: split / colocated"): (1.04, _CHUNKS),
    ("dynaserve", "hybrid", "colocated: requests/s"): (8.52, _TUNED),
    ("dynaserve", "hybrid", "colocated: goodput (tokens/s)"): (504, _TUNED),
    ("dynaserve", "hybrid", "requests/s, split / colocated"): (1, _CHUNKS),
    ("dynaserve", "hybrid", "requests/s, split / disaggregated"): (1.65, _HYBRID_DISAGG),
    (
        "dynaserve",
        "inside",
        "share of the waiting for KV that pulling behind the computation hides",
    ): (0.0, _HIDDEN),
    ("dynaserve", "inside", "P219-D1467, exact outputs: goodput (tokens/s)"): (4640, _KV),
}
