"""vLLM's own statistics of each batch of outputs, handed to the live view."""

import time
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from flying_serving.observe.view.rolling import Rolling


class RollingLogger(AggregateStatLoggerBase):
    """A stat logger of vLLM that notes tokens, times and KV usage, as vLLM defines and has already
    computed them.
    """

    def __init__(self, rolling: Rolling) -> None:
        self._rolling = rolling

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Note a batch of outputs. vLLM calls this in the server's event loop."""
        kv_usage = None if scheduler_stats is None else scheduler_stats.kv_cache_usage
        tokens, first_s, gaps_s = 0, [], []
        if iteration_stats is not None:
            tokens = iteration_stats.num_generation_tokens
            first_s = iteration_stats.time_to_first_tokens_iter
            gaps_s = iteration_stats.inter_token_latencies_iter
        self._rolling.note_batch(engine_idx, kv_usage, tokens, first_s, gaps_s, time.monotonic())

    def log_engine_initialized(self) -> None:
        """Log nothing about an engine that is ready."""


def roll(engine_client: Any, rolling: Rolling) -> None:
    """Send a server's statistics to `rolling` too; with --disable-log-stats there are none."""
    if engine_client.logger_manager is not None:
        engine_client.logger_manager.stat_loggers.append(RollingLogger(rolling))
