"""Types of engines' answers to the API server's utility calls, in which vLLM carries plain
values.
"""

from typing import Any

import msgspec

from flying_serving.parallelism import Parallelism


class SwitchAnswer(msgspec.Struct, frozen=True):
    """An engine's answer to an order to change the layout.

    `in_flight_ms`: how long the step that was under way kept the order waiting. `overhead_ms`: the
    rest of the time since the order was sent. `work_ms`: processor time of the call.
    """

    in_flight_ms: float
    overhead_ms: float
    work_ms: float

    @property
    def cutover_ms(self) -> float:
        """The time since the order was sent."""
        return self.in_flight_ms + self.overhead_ms


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One step that an engine led.

    `size`: engines in its group. `prefill_tokens`: tokens of prompts. `sequences`: requests that
    decoded one token. `context_tokens`: tokens of its requests that were computed before.
    `prefill_pairs`: prompt tokens times the tokens of the same request that were computed before.
    `disturbed`: `seconds` include a step that an engine of the group made meanwhile in another
    lane. `parallelism`: what its members divided.
    """

    size: int
    seconds: float
    prefill_tokens: int
    sequences: int
    context_tokens: int
    prefill_pairs: int
    disturbed: bool
    parallelism: Parallelism = Parallelism.TENSOR


class CalibrationRow(msgspec.Struct, frozen=True, array_like=True):
    """The fastest step of a batch that was measured at start.

    `tokens`: of one prompt, or decoding requests of one token each. `context_tokens`: tokens before
    them, of the prompt or of each request. `parallelism`: what the group's members divided.
    """

    size: int
    seconds: float
    tokens: int
    is_prefill: bool
    context_tokens: int
    parallelism: Parallelism = Parallelism.TENSOR


class MigrationRow(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that it took to migrate the KV of `tokens` tokens in a group of `size` engines, at
    start.
    """

    size: int
    seconds: float
    tokens: int


class Measured(msgspec.Struct, frozen=True):
    """An engine's measurements when the server started, kept for its next start alone."""

    steps: list[CalibrationRow]
    migrations: list[MigrationRow]


class LaneCounts(msgspec.Struct, frozen=True):
    """Requests of a lane that an engine leads."""

    running: int
    waiting: int


class MigrationCounts(msgspec.Struct, frozen=True):
    """Since the start: requests that arrived with KV, tokens of it, and requests that were
    prefilled again.
    """

    migrated: int
    migrated_tokens: int
    prefilled_again: int


class EngineReport(msgspec.Struct, frozen=True):
    """An engine in `GET /flying/status`: the contents and the work of its lanes. Keys are group
    sizes.
    """

    engine: int
    pid: int
    lanes: dict[int, LaneCounts]
    blocks: int
    free_blocks: int
    lent_blocks: dict[int, int]
    steps: dict[int, int]
    migrations: MigrationCounts


class EngineMemory(msgspec.Struct, frozen=True):
    """Bytes of weights and KV cache on each device of an engine.

    `kv_bytes`: without any lent weights. `lent_bytes`: of the weights, where there are extra KV
    blocks now.
    """

    weight_bytes: int
    kv_bytes: int
    lent_bytes: int = 0


class EngineFigures(msgspec.Struct, frozen=True):
    """An engine in `/metrics` and the live view: figures that only it knows, by group size.

    `hard`: its last order was a hard switch. `requests`: (running, waiting) of lanes that it leads.
    `lent_blocks`: to its groups. `steps`: rows of histograms (`Histogram.row`). `token_parallel`:
    the number of those steps of groups of several that were token parallel. `prefix_cache`: tokens
    (looked up, found).
    """

    hard: bool
    requests: dict[int, tuple[int, int]]
    lent_blocks: dict[int, int]
    steps: dict[int, list[float]]
    token_parallel: dict[int, int]
    prefix_cache: dict[int, tuple[int, int]]
    migrations: MigrationCounts
    memory: EngineMemory


ANSWERS: dict[str, Any] = {
    "flying_switch": SwitchAnswer,
    "flying_steps": list[StepRow],
    "flying_calibration": list[CalibrationRow],
    "flying_migration_costs": list[MigrationRow],
    "flying_report": EngineReport,
    "flying_metrics": EngineFigures,
    "flying_peers": Any,
    "flying_check": Any,
    "flying_block_bytes": Any,
    "flying_weave": Any,
    "flying_retain": Any,
    "flying_prepare_to_lend": Any,
    "flying_lend_weights": Any,
    "flying_fetch_weights": Any,
}
"""The utilities of an engine (`engine/utilities.py`, and of its weights
`weights/lending/engine_weights.py`), each with the type of its answer.

Any: a number, that all is well, or nothing.
"""


def encode(answer: object) -> Any:
    """Return the answer in plain values, as vLLM's utility calls carry it."""
    return msgspec.to_builtins(answer)


def decode(method: str, plain: Any) -> Any:
    """Return the answer to a utility call, of the type in ANSWERS. Raises msgspec.ValidationError
    if it is of another.
    """
    return msgspec.convert(plain, ANSWERS[method]) if method in ANSWERS else plain
