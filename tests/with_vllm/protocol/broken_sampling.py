"""Faults in what becomes of members that sample other tokens than their leader."""

from __future__ import annotations

from typing import Any

from flying_serving.engine.group import Leader
from flying_serving.engine.loop import EngineLoop
from flying_serving.engine.sampled import SampledTokens
from flying_serving.layout.groups import Group
from tests.with_vllm.protocol.faults import Fault


class _NotCompared(SampledTokens):
    def why_apart(self, group: Group) -> str | None:
        return None


class _NotShown(SampledTokens):
    def begin_anew(self, size: int) -> None:
        shown = self._board.note_sampled
        self._board.note_sampled = lambda *noted: None  # type: ignore[method-assign]
        try:
            super().begin_anew(size)
        finally:
            self._board.note_sampled = shown  # type: ignore[method-assign]


class _GoesOn(Leader):
    def fail(self, plan: Any, output: Any, why: str) -> Any:
        return self.finish(plan, output)


def break_sampling(fault: Fault | None, loop: EngineLoop) -> None:
    """Break the comparison of tokens, or what follows from it, if that is the fault."""
    if fault is Fault.TOKENS_NOT_COMPARED:
        loop.sampled.__class__ = _NotCompared
    if fault is Fault.ANEW_NOT_SHOWN:
        loop.sampled.__class__ = _NotShown
    if fault is Fault.GOES_ON_APART:
        for leader in loop.lanes.leaders.values():
            leader.__class__ = _GoesOn
