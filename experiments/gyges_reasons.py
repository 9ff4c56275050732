"""Why numbers differ from Gyges': what the model consists of, and what the rows show."""

from __future__ import annotations

_DEGREE = (
    "from degree 2 to 4 the published rate grows by 1.14 only. What an all-reduce would have to "
    "take for that is in [cost_model.md](cost_model.md), `gyges-tp4-rate`."
)
_FEED_FORWARD = (
    "the model's products read their zeros as they read weights, and decoding waits for just "
    "that; the paper does not say how its kernels do not."
)
_CHUNK = "one chunk of 32 MiB is on its way."
_RECEIVED = (
    "with trimming a device receives 90 % of the KV of a full memory before it trims; the paper's "
    "12 times 70 MB is much less. It does not say how full its memory was."
)
_TRIM = (
    "in the model trimming is a copy within the device's memory, which is short beside the link, "
    "and chunks take more messages than layers (*apart* in *Both, beside steps*)."
)
_BESIDE = (
    "what is received and sent is read and written in memory that steps wait for; trimming adds "
    "little to that (*staggered* in *Both, beside steps*), so there is less to save."
)
_HALF_SECOND = (
    "the model has the time of the link and of messages alone. At the link's rate the paper's "
    "time would carry 27 times the KV that is in use (522 / 19.3)."
)
_CALLS = (
    "remapping allocations is nearly all of the time of both ways (*Both, beside steps*). The "
    "paper does not say how much its swap copies."
)
_NO_COPY = "calls of the driver are made beside steps, and nothing is copied."
_PAGES = "the model remaps each unit once; the paper may remap each page of 2 MiB, which are more."
_LAYER = "the paper's is an upper bound."
_SEESAW = (
    "all layers in one step do not fit beside it here: joining takes longer apart than a decode "
    "step (*Both, beside steps*). Seesaw has the data sheet's link to the host."
)
_OPEN = (
    "nothing is full at these rates: the others join engines more often, and with a second group "
    "requests decode faster, at a later first token (table above)."
)
_BUSY = (
    "pipelines and sequence parallelism as modelled keep all engines busy and have no "
    "all-reduces. With one engine at a time, as the paper says of them, the rows of *serial* "
    "hold."
)
_SMALL = (
    "LoongServe's requests wait for their first token (table above), so few decode beside "
    "prompts, and have a low time per token."
)
_QUEUE = (
    "one engine at a time is overloaded at each of these rates, so the queue grows as long as "
    "requests arrive."
)
_SAME = (
    "the rivals have the product's scheduler here too. It sends long requests to one group, and "
    "the other engines serve the rest at their full rate; the paper's rivals have schedulers of "
    "their own."
)
_STALLS = (
    "engines that stop for a transformation as long as the model says lose little: `gyges-paper` "
    "and `gyges-stopped` join a few times in a run (table above). The paper's transformations take "
    "longer."
)

REASONS: dict[tuple[str, str, str], tuple[float, str]] = {
    ("gyges", "table1", "TP4: one instance (tokens/s)"): (1096, _DEGREE),
    ("gyges", "table1", "TP4: four devices (tokens/s)"): (1096, _DEGREE),
    ("gyges", "padding", "feed-forward time with padding, longer by"): (0.0359, _FEED_FORWARD),
    ("gyges", "kv", "extra memory (MB)"): (33.6, _CHUNK),
    ("gyges", "kv", "extra memory with trimming / in place"): (161, _RECEIVED),
    ("gyges", "kv", "time, not beside steps, less than with trimming"): (-0.0652, _TRIM),
    ("gyges", "kv", "time, beside steps, less than with trimming"): (0.81, _BESIDE),
    ("gyges", "kv", "time with trimming / in place"): (0.939, _TRIM),
    ("gyges", "kv", "one transformation, not beside steps (ms)"): (19.3, _HALF_SECOND),
    ("gyges", "weights", "time, not beside steps, less than with a swap"): (0.0236, _CALLS),
    ("gyges", "weights", "time, beside steps, less than with a swap"): (1.0, _NO_COPY),
    ("gyges", "weights", "with a swap (ms)"): (43.7, _PAGES),
    ("gyges", "step", "a step that transforms one layer, longer by"): (0.00146, _LAYER),
    ("gyges", "step", "all layers in one step, less than Seesaw"): (0.941, _SEESAW),
    ("gyges", "step", "Seesaw's time / ours"): (16.8, _SEESAW),
    ("gyges", "scheduler", "gyges / round robin: tokens/s, 1x"): (0.958, _OPEN),
    ("gyges", "scheduler", "gyges / least load: tokens/s, 1x"): (0.959, _OPEN),
    ("gyges", "trace", "gyges / loongserve: tokens/s (private trace)"): (1.35, _SAME),
    ("gyges", "trace", "gyges: TTFT less than loongserve's (private trace)"): (0.597, _SAME),
    ("gyges", "trace", "gyges: TPOT less than loongserve's (private trace)"): (0.173, _SMALL),
    ("gyges", "trace", "gyges / loongserve-serial: tokens/s (private trace)"): (1.27, _SAME),
    ("gyges", "trace", "gyges: TTFT less than loongserve-serial's (private trace)"): (
        0.848,
        _QUEUE,
    ),
    ("gyges", "trace", "gyges: TPOT less than loongserve-serial's (private trace)"): (
        0.163,
        _SMALL,
    ),
    ("gyges", "trace", "gyges / kunserve: tokens/s (private trace)"): (1.02, _BUSY),
    ("gyges", "trace", "gyges: TTFT less than kunserve's (private trace)"): (0.0175, _BUSY),
    ("gyges", "trace", "gyges: TPOT less than kunserve's (private trace)"): (0.0797, _BUSY),
    ("gyges", "trace", "gyges / kunserve-serial: tokens/s (private trace)"): (1.31, _SAME),
    ("gyges", "trace", "gyges: TTFT less than kunserve-serial's (private trace)"): (0.833, _QUEUE),
    ("gyges", "trace", "gyges: TPOT less than kunserve-serial's (private trace)"): (0.667, _SAME),
    ("gyges", "trace", "gyges: TTFT less than gyges-stopped's (private trace)"): (0.0121, _STALLS),
}
