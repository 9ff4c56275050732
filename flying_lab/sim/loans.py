"""Weights that are lent to the KV cache in the simulator: pieces go and come back between steps, as
live.

As `weights/lending/engine_weights.py`, with blocks that are counted instead of named. To empty a
block in use takes no time here, if another one is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flying_lab.sim.lanes import SimLane
from flying_lab.sim.requests import BlockPool
from flying_serving.config import LOAN_SHARE


@dataclass(frozen=True)
class Loan:
    """The loan that each engine of a widest group can make, in pieces.

    `room`: additional KV blocks by the number of pieces that are gone, from none to all. `lend_s`,
    `fetch_s`: seconds in which each piece goes, and comes back; the engine does nothing beside it.
    """

    room: tuple[int, ...]
    lend_s: tuple[float, ...]
    fetch_s: tuple[float, ...]

    @property
    def blocks(self) -> int:
        """Return the additional KV blocks when all pieces are gone."""
        return self.room[-1]


class SimWeights:
    """The weights of one engine: `gone` pieces are lent, `pool` has their room.

    `lanes`: the lanes of which it is a member. `call` calls a function after some seconds, `kick`
    lets the engine choose its next work.
    """

    def __init__(
        self,
        loan: Loan,
        pool: BlockPool,
        lanes: Sequence[SimLane],
        call: Callable[[float, Callable[[], None]], None],
        kick: Callable[[], None],
    ) -> None:
        self.gone = 0
        self._loan = loan
        self._pool = pool
        self._lanes = lanes
        self._call = call
        self._kick = kick
        self._target = 0
        self._done: Callable[[], None] | None = None
        self._next_s = 0.0

    def begin(self, *, lends: bool, done: Callable[[], None]) -> None:
        """Lend all pieces or fetch all back; then `done` is called."""
        assert self._done is None, "weights are on their way already"
        self._target, self._done, self._next_s = len(self._loan.lend_s) if lends else 0, done, 0.0
        self._kick()

    def advance(self, now_s: float) -> float:
        """Begin the next piece between two steps, if it is due and its room is free. Returns its
        seconds.
        """
        if self._done is None:
            return 0.0
        if self.gone == self._target:
            done, self._done = self._done, None
            self._call(0.0, done)
            return 0.0
        if now_s < self._next_s:
            return 0.0
        loan, lends = self._loan, self.gone < self._target
        piece = self.gone if lends else self.gone - 1
        blocks, took_s = (
            loan.room[piece + 1] - loan.room[piece],
            (loan.lend_s if lends else loan.fetch_s)[piece],
        )
        if not lends:
            if self._pool.free < blocks:
                return 0.0  # a step that uses these blocks ends first
            self._grow(-blocks)
        rest_s = (
            took_s * (1 - LOAN_SHARE) / LOAN_SHARE
            if any(lane.requests for lane in self._lanes)
            else 0.0
        )
        pause_s = took_s + rest_s
        self._next_s = now_s + pause_s
        self._call(took_s, lambda: self._over(blocks if lends else 0, 1 if lends else -1))
        if rest_s:
            self._call(pause_s, self._kick)
        return took_s

    def _over(self, blocks: int, pieces: int) -> None:
        self.gone += pieces
        self._grow(blocks)

    def _grow(self, blocks: int) -> None:
        self._pool.blocks += blocks
        self._pool.free += blocks
