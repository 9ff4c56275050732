"""The API server's calls of an engine beside requests: vLLM utilities by these names, handled
between two steps.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

from flying_serving.config import MIGRATING_MODES
from flying_serving.engine.loop import EngineLoop
from flying_serving.weights.lending.engine_weights import WeightUtilities
from flying_serving.wire import (
    CalibrationRow,
    EngineFigures,
    EngineReport,
    LaneCounts,
    MigrationRow,
    SwitchAnswer,
    encode,
)


@dataclass(frozen=True)
class EngineUtilities(WeightUtilities):
    """Answers of one engine, also from its workers' measurements at start: steps of all lanes, and
    copies of KV.
    """

    loop: EngineLoop
    block_bytes: int
    calibration: list[CalibrationRow]
    migration_costs: list[MigrationRow]

    def flying_switch(self, group: list[int], mode: str, weave_steps: int, sent_s: float) -> Any:
        """Make `group` this engine's present group from now on. Return a `SwitchAnswer`.

        `mode`: by *hard* older lanes pause, by every other mode they are woven in. By *migrate* or
        *soft* they pause first, until `flying_retain`, if the group changes. `weave_steps`: steps
        of the new layout for each step of an older one. `sent_s`: when the API server ordered it
        (CLOCK_MONOTONIC).
        """
        worked_s = time.thread_time()
        now_s = self.loop.clock()
        arbiter, trace = self.loop.arbiter, self.loop.instruments.trace
        if mode in MIGRATING_MODES and len(group) != arbiter.present:
            arbiter.pause_older(now_s)
        arbiter.switch(len(group), hard=mode == "hard", weave_steps=weave_steps, now_s=now_s)
        if trace is not None:
            trace.ordered(group, mode, now_s)
        began_s, ended_s = self.loop.last_step_s
        in_flight_s = max(0.0, ended_s - max(began_s, sent_s))
        overhead_s, work_s = max(0.0, now_s - sent_s - in_flight_s), time.thread_time() - worked_s
        return encode(SwitchAnswer(in_flight_s * 1e3, overhead_s * 1e3, work_s * 1e3))

    def flying_weave(self) -> None:
        """Let a hard switch pause older lanes no longer: the server waits until their requests have
        ended.
        """
        self.loop.arbiter.weave()

    def flying_peers(self, incarnations: list[int | None]) -> bool:
        """Take the engines of the server from now on: see `Membership`."""
        self.loop.set_peers(incarnations)
        return True

    def flying_report(self) -> Any:
        """Return an `EngineReport`: the contents and the work of each lane of this engine."""
        own, instruments = self.loop.lanes.own_pool, self.loop.instruments
        durations = instruments.steps.durations
        return encode(
            EngineReport(
                engine=self.loop.engine,
                pid=os.getpid(),
                lanes={size: LaneCounts(*of) for size, of in instruments.report.counts().items()},
                blocks=own.total + 1,
                free_blocks=own.free_count(),
                lent_blocks=instruments.report.lent_blocks(),
                steps={size: seconds.count for size, seconds in durations.items()},
                migrations=self.loop.migrations.incoming.counts(),
            )
        )

    def flying_metrics(self) -> Any:
        """Return an `EngineFigures`: figures that only this engine knows, for `/metrics` and the
        live view.
        """
        report, steps = self.loop.instruments.report, self.loop.instruments.steps
        return encode(
            EngineFigures(
                hard=self.loop.arbiter.hard,
                requests=report.counts(),
                lent_blocks=report.lent_blocks(),
                steps={size: seconds.row for size, seconds in steps.durations.items()},
                token_parallel={
                    size: steps.token_parallel[size] for size in steps.durations if size > 1
                },
                prefix_cache=report.prefix_cache,
                migrations=self.loop.migrations.incoming.counts(),
                memory=self.memory_now,
            )
        )

    def flying_check(self) -> bool:
        """Check the block bookkeeping of all lanes. Raises IntegrityError with both sides of a sum
        that does not add up.
        """
        self.loop.lanes.check()
        if self.weights is not None:
            self.weights.check()
        return True

    def flying_block_bytes(self) -> int:
        """Return the bytes of one KV block, all layers, on one device."""
        return self.block_bytes

    def flying_retain(self, leaving: list[tuple[str, int]]) -> None:
        """Let requests leave this engine for another group, which may pull their KV. `leaving`:
        ids, and numbers of offers.
        """
        self.loop.arbiter.resume_older()
        for request_id, number in leaving:
            self.loop.migrations.retain(request_id, number)

    def flying_migration_costs(self) -> Any:
        """Return the durations of copies of KV, measured at start: a `MigrationRow` each. Empty if
        KV cannot be copied.
        """
        return encode(self.migration_costs)

    def flying_steps(self) -> Any:
        """Return the steps that this engine has led since the last call: a `StepRow` each."""
        return encode(self.loop.instruments.steps.take_rows())

    def flying_calibration(self) -> Any:
        """Return the steps measured at start, in all lanes of this engine: a `CalibrationRow`
        each.
        """
        return encode(self.calibration)
