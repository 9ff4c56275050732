"""Faults of lending weights that can be injected: see `faults.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flying_serving.weights.lending.engine_weights import BlockLender
from tests.with_vllm.protocol.faults import Fault
from tests.with_vllm.protocol.memory import Memory
from tests.with_vllm.protocol.weights import Weights


class _NotEmpty(Weights):
    def _empty(self, blocks: range, now_s: float) -> bool:
        super()._empty(blocks, now_s)
        return True


class _NotReplaced(Weights):
    def _copy(self, copies: dict[int, int], members: Iterable[BlockLender]) -> None:
        super()._copy(copies, ())


class _TablesKept(Memory):
    def copy(self, copies: Mapping[int, int]) -> None:
        tables = self.tables
        super().copy(copies)
        self.tables = tables


WEIGHTS: dict[Fault | None, type[Weights]] = {
    Fault.NOT_EMPTY: _NotEmpty,
    Fault.NOT_REPLACED: _NotReplaced,
}


def break_weights(fault: Fault | None, weights: Weights, memory: Memory) -> None:
    """Break lending, if that is the fault."""
    weights.__class__ = WEIGHTS.get(fault, Weights)
    memory.__class__ = _TablesKept if fault is Fault.TABLES_KEPT else Memory
