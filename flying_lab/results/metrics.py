"""Every metric, defined once. Names and definitions are as in `vllm bench serve` unless a docstring
says otherwise.

Times of a request count from the moment it was sent, as in vLLM. The delay until then is the
client's lag, which is reported apart.
"""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flying_lab.results.lag import Lag
from flying_lab.results.results import Floats, Mask, Results
from flying_lab.results.timeline import concurrency, stretches, tokens_per_s
from flying_serving.slo import Slo

PERCENTILES = (50, 90, 95, 99)
MOST_ERRORS = 10
Summary = dict[str, Any]


def ttft_s(results: Results) -> Floats:
    """Return time to first token: from sending to the first event with tokens; NaN if there was
    none.
    """
    return _at(results, results.event_starts) - results.floats("sent_s")


def e2el_s(results: Results) -> Floats:
    """Return end-to-end latency: from sending to the last event with tokens; NaN if there was
    none.
    """
    return _at(results, results.event_ends - 1) - results.floats("sent_s")


def tpot_s(results: Results) -> Floats:
    """Return time per output token after the first: (e2el - ttft) / (output tokens - 1); NaN for
    less than two tokens.
    """
    after_first = results.floats("output_tokens") - 1
    return np.where(
        after_first > 0, (e2el_s(results) - ttft_s(results)) / np.maximum(after_first, 1), np.nan
    )


def itl_s(results: Results, requests: Mask) -> Floats:
    """Return inter-token latencies: gaps between events with tokens, of all these requests
    together.
    """
    begin, end = token_gaps(results, requests)
    return end - begin


def token_gaps(results: Results, requests: Mask | None = None) -> tuple[Floats, Floats]:
    """Return (begin, end) of the time between each event with tokens and the next of the same
    request, by default of all.
    """
    owner = np.repeat(np.arange(len(results)), results.event_ends - results.event_starts)
    same = owner[1:] == owner[:-1]
    if requests is not None:
        same &= requests[owner[1:]]
    return results.event_s[:-1][same], results.event_s[1:][same]


def queue_s(results: Results) -> Floats:
    """Return time in the engine's queue as the server reports it (vLLM's
    --enable-per-request-metrics); NaN if it does not.
    """
    return results.floats("queue_s")


def good(results: Results, slo: Slo) -> Mask:
    """Return the requests that are complete and keep every limit. One token has a TPOT of 0, as in
    vLLM.
    """
    mask = results.ok.copy()
    for limit_ms, values in (
        (slo.ttft, ttft_s(results)),
        (slo.tpot, np.nan_to_num(tpot_s(results), nan=0.0)),
        (slo.e2el, e2el_s(results)),
    ):
        if limit_ms is not None:
            mask &= values * 1e3 <= limit_ms
    return mask


def deadlines_kept(results: Results) -> Mask:
    """Return the requests that are complete by their deadline, which counts from their arrival in
    the workload.
    """
    over_s = (
        e2el_s(results)
        + results.floats("sent_s")
        - results.floats("arrival_s")
        - results.floats("deadline_s")
    )
    return results.ok & (over_s <= 0)


def summarise(results: Results, slo: Slo | None = None) -> Summary:
    """Return all metrics of a replay, of each of its phases, and of each priority if there are
    several.

    As in vLLM, only completed requests have latencies and throughput. All others are counted:
    `completed`, `failed` and `unfinished` add up to `num_prompts`. Unlike in vLLM a metric without
    values is None, not 0.
    """
    run, everything = results.run, np.ones(len(results), dtype=bool)
    summary: Summary = {
        "workload": run.workload,
        "model_id": run.model,
        "seed": run.seed,
        "duration": run.duration_s,
        **_counts(results, everything, run.duration_s, slo),
        "max_output_tokens_per_s": int(tokens_per_s(results).max(initial=0)),
        "max_concurrent_requests": int(concurrency(results)[1].max(initial=0)),
        **_latencies(results, everything),
        **{name: getattr(run, name) for name in Lag.__struct_fields__},
        "client_behind": run.behind,
    }
    errors = Counter(text for text in results.texts("error") if text is not None)
    summary["error_counts"] = dict(errors.most_common(MOST_ERRORS))
    phases = _phases(results, slo)
    if phases:
        summary["phases"] = phases
    priorities = results.floats("priority")
    values = np.unique(priorities)
    if len(values) > 1:
        summary["priorities"] = {
            str(int(value)): {
                **_counts(results, priorities == value, run.duration_s, slo),
                **_latencies(results, priorities == value),
            }
            for value in values
        }
    return summary


def _phases(results: Results, slo: Slo | None) -> Summary:
    """Return for each phase the metrics of the requests that arrived in it, per second of the
    phase.

    `output_throughput_during` counts all tokens that came while the phase was on, also of requests
    that arrived before.
    """
    found = stretches(results)
    labels = results.texts("phase")
    summary: Summary = {}
    for phase in dict.fromkeys(stretch.phase for stretch in found):
        spans = [(stretch.start_s, stretch.end_s) for stretch in found if stretch.phase == phase]
        seconds = sum(end - start for start, end in spans)
        inside = np.zeros(len(results.event_s), dtype=bool)
        for start, end in spans:
            inside |= (start <= results.event_s) & (results.event_s < end)
        requests = np.asarray(labels == phase, dtype=bool)
        summary[phase] = {
            "duration": seconds,
            **_counts(results, requests, seconds, slo),
            "output_throughput_during": _rate(results.event_tokens[inside].sum(), seconds),
            **_latencies(results, requests),
        }
    return summary


def _rate(amount: float, seconds: float) -> float | None:
    """Return an amount per second; None if there was no time."""
    return float(amount) / seconds if seconds > 0 else None


def _at(results: Results, positions: NDArray[np.int64]) -> Floats:
    """Return the times of events, NaN for requests without any."""
    times = np.full(len(results), np.nan)
    some = results.event_ends > results.event_starts
    times[some] = results.event_s[positions[some]]
    return times


def _counts(results: Results, requests: Mask, duration_s: float, slo: Slo | None) -> Summary:
    """Return numbers of requests and tokens, in all and per second."""
    status = results.texts("status")
    done = results.ok & requests
    prompts, outputs = (
        int(results.floats(name)[done].sum()) for name in ("prompt_tokens", "output_tokens")
    )
    counts: Summary = {
        "num_prompts": int(requests.sum()),
        "completed": int(done.sum()),
        "failed": int((requests & (status == "failed")).sum()),
        "unfinished": int((requests & (status == "unfinished")).sum()),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": _rate(done.sum(), duration_s),
        "output_throughput": _rate(outputs, duration_s),
        "total_token_throughput": _rate(prompts + outputs, duration_s),
        "request_goodput": None,
    }
    if slo is not None:
        kept = int((good(results, slo) & requests).sum())
        counts["request_goodput"] = _rate(kept, duration_s)
        counts["slo_attainment"] = kept / int(requests.sum())
    with_deadline = requests & ~np.isnan(results.floats("deadline_s"))
    if with_deadline.any():
        counts["deadline_attainment"] = float(deadlines_kept(results)[with_deadline].mean())
    return counts


def _latencies(results: Results, requests: Mask) -> Summary:
    """Return mean, median, deviation and percentiles of each latency, in ms, over completed
    requests.
    """
    done = results.ok & requests
    summary: Summary = {}
    for name, values in (
        ("ttft", ttft_s(results)[done]),
        ("tpot", tpot_s(results)[done]),
        ("itl", itl_s(results, done)),
        ("e2el", e2el_s(results)[done]),
        ("queue_time", queue_s(results)[done]),
    ):
        known = values[~np.isnan(values)] * 1e3
        summary[f"mean_{name}_ms"] = float(known.mean()) if len(known) else None
        summary[f"median_{name}_ms"] = float(np.median(known)) if len(known) else None
        summary[f"std_{name}_ms"] = float(known.std()) if len(known) else None
        for percentile in PERCENTILES:
            value = float(np.percentile(known, percentile)) if len(known) else None
            summary[f"p{percentile}_{name}_ms"] = value
    return summary
