"""Why numbers differ from Gyges': found by changing the simulation, or by arithmetic on what it
consists of.
"""

from __future__ import annotations

_DEGREE = (
    "from degree 2 to 4 the published rate grows by 1.14 only; for the model to have it, an "
    "all-reduce would take 62 "
    "us, five times what kernels over NVLink take ([cost_model.md](cost_model.md))."
)
_FEED_FORWARD = (
    "the model's products read their zeros as they read weights, 3.7 % more bytes, and decoding "
    "waits for just that; "
    "the paper does not say how its kernels do not."
)
_CHUNK = "one chunk of 32 MiB is on its way; two would be 67 MB."
_RECEIVED = (
    "12 times 70 MB is what a device receives of 4,270 tokens; with the paper's sizes of weights "
    "and activations, "
    "90 % of its KV memory are 27,500 tokens, 5.4 GB to receive."
)
_TRIM = (
    "5.4 GB over the link take 15 ms, trimming copies 1.8 GB within the device's memory in 1.4 "
    "ms, and chunks take 97 "
    "more messages of 27 us than layers. The paper's trimming takes 1.6 times as long as its link."
)
_BESIDE = (
    "what is received and sent is read and written in memory that steps wait for, 4.2 ms in all; "
    "trimming adds only "
    "1.4 ms to the time of the link in the model, so there is less to save."
)
_HALF_SECOND = "5.4 GB take 15 ms at 361 GB/s; in 522 ms that link would carry 188 GB."
_CALLS = (
    "576 allocations are remapped in 74 us each, 98 % of the time of both ways; a swap copies "
    "1.6 MB of each tensor, "
    "1.1 ms in all. The paper does not say how much its swap copies."
)
_NO_COPY = "calls of the driver are made beside steps, and nothing is copied."
_PAGES = (
    "with one allocation for each page of 2 MiB, not for each unit, it is 1.44 s, so the "
    "paper's is between both."
)
_LAYER = "the paper's is an upper bound; here six layers in each step stay within it."
_SEESAW = (
    "the driver's calls for all layers (43 ms) and KV (19 ms) do not fit beside one decode step "
    "of 40 ms. Seesaw has "
    "the data sheet's 64 GB/s here; with a third of that, ours would take 98 % less, 56 times."
)
_OPEN = (
    "nothing is full at these rates, and all requests are served: with a second group long "
    "requests just decode "
    "faster, so that more of their 5,879 tokens are out when arrivals end, at a TTFT of 1.05 to "
    "1.36 s instead of "
    "0.74. With 118 tokens for them too, all have the same, and `gyges` has 6 % more at four "
    "times the rates (first "
    "seed). With the paper's rate at degree 4 (all-reduces of 62 us) it is 0.89."
)
_BUSY = (
    "groups as modelled keep all engines busy and have no all-reduces, so a step of 2,048 prompt "
    "tokens takes 0.37 s "
    "in a pipeline or divided by tokens, and 0.38 s at degree 4. With one engine at a time, as "
    "the paper says of them, "
    "the rows of *serial* hold."
)
_SMALL = (
    "LoongServe's KV memory is full, so its requests wait for their first token, and few decode "
    "beside prompts, where "
    "a token takes 0.38 s. With as much KV memory as KunServe it has 57 s instead of 159 to the "
    "first token at 0.9 "
    "requests/s, and 331 ms per token instead of 86 (first seed)."
)
_QUEUE = (
    "one engine at a time is overloaded at each of these rates, so the queue grows as "
    "long as requests arrive."
)
_STALLS = (
    "stopped engines stand for 0.06 s when they join and 0.18 s when they part, two to seven "
    "times in 400 s. With the "
    "paper's 2.24 s for each transformation TTFT is 3 % less at 0.3 requests/s."
)

REASONS: dict[tuple[str, str, str], tuple[float, str]] = {
    ("gyges", "table1", "TP4: one instance (tokens/s)"): (1165, _DEGREE),
    ("gyges", "table1", "TP4: four devices (tokens/s)"): (1165, _DEGREE),
    ("gyges", "padding", "feed-forward time with padding, longer by"): (0.0361, _FEED_FORWARD),
    ("gyges", "kv", "extra memory (MB)"): (33.6, _CHUNK),
    ("gyges", "kv", "extra memory with trimming / in place"): (161, _RECEIVED),
    ("gyges", "kv", "time, not beside steps, less than with trimming"): (-0.051, _TRIM),
    ("gyges", "kv", "time, beside steps, less than with trimming"): (0.773, _BESIDE),
    ("gyges", "kv", "time with trimming / in place"): (0.951, _TRIM),
    ("gyges", "kv", "one transformation, not beside steps (ms)"): (19.3, _HALF_SECOND),
    ("gyges", "weights", "time, not beside steps, less than with a swap"): (0.0245, _CALLS),
    ("gyges", "weights", "time, beside steps, less than with a swap"): (1.0, _NO_COPY),
    ("gyges", "weights", "with a swap (ms)"): (43.7, _PAGES),
    ("gyges", "step", "a step that transforms one layer, longer by"): (0.00162, _LAYER),
    ("gyges", "step", "all layers in one step, less than Seesaw"): (0.946, _SEESAW),
    ("gyges", "step", "Seesaw's time / ours"): (18.6, _SEESAW),
    ("gyges", "scheduler", "gyges / round robin: tokens/s, 1x"): (0.957, _OPEN),
    ("gyges", "scheduler", "gyges / least load: tokens/s, 1x"): (0.957, _OPEN),
    ("gyges", "scheduler", "gyges-by-length / round robin: tokens/s, 1x"): (0.957, _OPEN),
    ("gyges", "scheduler", "gyges-by-length / least load: tokens/s, 1x"): (0.957, _OPEN),
    ("gyges", "trace", "gyges / loongserve: tokens/s (private trace)"): (1.14, _BUSY),
    ("gyges", "trace", "gyges: TPOT less than loongserve's (private trace)"): (-0.0613, _SMALL),
    ("gyges", "trace", "gyges: TTFT less than loongserve-serial's (private trace)"): (0.97, _QUEUE),
    ("gyges", "trace", "gyges: TPOT less than loongserve-serial's (private trace)"): (
        0.665,
        _SMALL,
    ),
    ("gyges", "trace", "gyges / kunserve: tokens/s (private trace)"): (1.06, _BUSY),
    ("gyges", "trace", "gyges: TTFT less than kunserve's (private trace)"): (-0.0278, _BUSY),
    ("gyges", "trace", "gyges: TPOT less than kunserve's (private trace)"): (0.0823, _BUSY),
    ("gyges", "trace", "gyges / kunserve-serial: tokens/s (private trace)"): (11.9, _QUEUE),
    ("gyges", "trace", "gyges: TTFT less than kunserve-serial's (private trace)"): (0.927, _QUEUE),
    ("gyges", "trace", "gyges: TTFT less than gyges-stopped's (private trace)"): (0.00981, _STALLS),
}
