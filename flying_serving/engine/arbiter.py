"""Whose turn it is on an engine: the weave, pure. Time is an argument (design section 5).

An engine may have work in several lanes at once: its *present* lane, whose group the layout names, and lanes of older
layouts that still drain. It also holds tickets, steps that other leaders ordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXPECT_S = 0.05
"""How long a member keeps still for the next step of its present group after the leader said that there is more."""
STILL_S = 0.005
"""The same for an older group whose turn goes on: short, as the last of its requests may just have ended."""


@dataclass(frozen=True)
class Serve:
    """Run the oldest ticket."""


@dataclass(frozen=True)
class StepTurn:
    """Step a lane that this engine leads: run it (size 1), or order a step of its group."""

    size: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do until a message comes, or for at most `timeout_s`."""

    timeout_s: float | None


Turn = Serve | StepTurn | Wait


class LaneArbiter:
    """Chooses what an engine does next.

    A weave shares time, not steps: every change from one lane to another may have to wait for the engines that still do
    something else, so when a step of the present lane is long (a chunk of prompts), an older lane makes several short
    ones (decodes) before the present lane goes on; members keep still for them, too. Coming together costs neither lane
    of its time; where members do not keep still, an older lane pays for the wait.

    Args:
        weave_steps: steps of the present lane before an older one gets as much time as one of them took.
        max_pause_s: an older lane gets a step at least this often, under a hard switch only this often.
    """

    def __init__(self, weave_steps: int, max_pause_s: float) -> None:
        self.present = 1
        self.hard = False
        self.weave_steps = weave_steps
        self.max_pause_s = max_pause_s
        self._present_steps = 0
        self._took_s: dict[int, float] = {}
        self._turned: set[int] = set()
        self._left_s = 0.0
        self._stepped_at: dict[int, float] = {}
        self._expect_until = 0.0
        self._expects_older = False
        self._announced: set[int] = set()

    def switch(self, present: int, *, hard: bool, weave_steps: int, now: float) -> None:
        """The layout changed: `present` is the size of this engine's group from now on."""
        if present != self.present:
            self._expect_until = 0.0
            self._stepped_at.setdefault(self.present, now)
        self.present, self.hard, self.weave_steps = present, hard, weave_steps
        self._present_steps, self._turned, self._left_s = 0, set(), 0.0

    def ran(
        self, size: int, now: float, *, more: bool, led_here: bool, took_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """A step of the lane `size` has run here.

        Args:
            more: its leader goes on at once.
            took_s: for so long, without the wait for other members.
            waited_s: so long was that wait.
        """
        self._stepped_at[size] = now
        if not led_here:
            self._expects_older = size != self.present
            still_s = STILL_S if self._expects_older else EXPECT_S
            self._expect_until = now + still_s if more else 0.0
        elif size == self.present:
            self._expect_until = 0.0
        if size == self.present:
            self._present_steps += 1
            self._left_s = self._took_s[size] = took_s
            self._turned.clear()
        else:
            self._took_s[size] = took_s + (waited_s if size in self._turned else 0.0)
            self._left_s -= self._took_s[size]
            self._turned.add(size)
            self._present_steps = 0

    def announce(self, size: int) -> bool:
        """Whether the lane `size`, if it steps now, steps again at once after that, as far as its turn goes.

        The members keep still for it then, and else do not: so an older group goes on only if this said so.
        """
        took_s = self._took_s.get(size, 0.0)
        more = size == self.present or (not self.hard and self._left_s - took_s > took_s / 2)
        (self._announced.add if more else self._announced.discard)(size)
        return more

    def choose(self, now: float, ready: Mapping[int, bool], *, ticket: bool) -> Turn:
        """What to do at `now`.

        Args:
            ready: by group size, for the lanes that this engine leads: whether it has a step to make.
            ticket: whether a ticket waits.
        """
        older = [size for size, has_work in ready.items() if has_work and size != self.present]
        present_ready = ready.get(self.present, False)
        present_busy = ticket or present_ready or now < self._expect_until
        due = [size for size in older if not present_busy or self._is_due(size, now, present_ready)]
        if due:  # a lane whose turn it is goes on: members keep still for it
            return StepTurn(min(due, key=lambda size: (not self._in_turn(size), self._stepped_at.get(size, 0.0))))
        if ticket:
            return Serve()
        if present_ready and not self.keeps_still(now):
            return StepTurn(self.present)
        return Wait(self._patience(older, now, present_ready))

    def keeps_still(self, now: float) -> bool:
        """Whether the present lane waits for the next step of an older group, of which this engine is a member."""
        return self._expects_older and now < self._expect_until

    def _is_due(self, size: int, now: float, present_ready: bool) -> bool:
        # Time bounds the weave too: other leaders' steps in a third lane start the count of present steps anew. But
        # a pause may be shorter than a step: between two steps of older lanes the present lane gets one.
        paused_s = now - self._stepped_at.setdefault(size, now)
        late = paused_s >= self.max_pause_s and (self._present_steps > 0 or not present_ready)
        its_turn = self._present_steps >= self.weave_steps or self._in_turn(size)
        return late or (not self.hard and its_turn)

    def _in_turn(self, size: int) -> bool:
        """Whether an older lane has stepped and most of another step of its fits into the time of the older ones."""
        fits = not self.hard and size in self._turned and self._left_s > self._took_s[size] / 2
        return fits and (size == 1 or size in self._announced)

    def _patience(self, older: list[int], now: float, present_ready: bool) -> float | None:
        if not older and not present_ready:
            return None
        ends = [self._stepped_at.get(size, now) + self.max_pause_s for size in older]
        return max(0.0, min([self._expect_until, *ends]) - now)
