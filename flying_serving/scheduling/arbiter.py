"""Which lane of an engine steps next: the weave, pure. Time is an argument.

An engine may have work in several lanes at once: its *present* lane, whose group the layout names, and lanes of older
layouts that still drain. It also has messages, steps that other leaders ordered.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HOLD_S = 0.05
"""How long a member holds for the next step of its present group after the leader said that there is more."""
RECALL_S = 0.5
"""How long older lanes pause after an order with which requests migrate, until it is said which."""
HOLD_OLDER_S = 0.005
"""The same for an older group within its time slice: short, as the last of its requests may just have ended."""


@dataclass(frozen=True)
class ServeMessage:
    """Handle the next message."""


@dataclass(frozen=True)
class StepLane:
    """Step a lane that this engine leads: run it (size 1), or order a step of its group."""

    size: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do until a message comes, or for at most `timeout_s`."""

    timeout_s: float | None


Action = ServeMessage | StepLane | Wait


class LaneArbiter:
    """Chooses what an engine does next.

    A weave shares time, not steps: every change from one lane to another may have to wait for the engines that still do
    something else, so when a step of the present lane is long (a chunk of prompts), an older lane makes several short
    ones (decodes) before the present lane goes on; members hold for them, too. The wait for other members counts for
    neither lane; where members do not hold, it counts for the older lane.

    After `weave_steps` steps of the present lane an older one gets as much time as one of them took; it gets a step at
    least every `max_pause_s`, under a hard switch only that often.
    """

    def __init__(self, weave_steps: int, max_pause_s: float) -> None:
        self.present = 1
        self.hard = False
        self.weave_steps = weave_steps
        self.max_pause_s = max_pause_s
        self._present_steps = 0
        self._took_s: dict[int, float] = {}
        self._sliced: set[int] = set()
        self._slice_left_s = 0.0
        self._stepped_at_s: dict[int, float] = {}
        self._hold_until_s = 0.0
        self._holds_for_older = False
        self._announced: set[int] = set()
        self._older_paused_until_s = 0.0

    def switch(self, present: int, *, hard: bool, weave_steps: int, now: float) -> None:
        """The layout changed: `present` is the size of this engine's group from now on."""
        if present != self.present:
            self._hold_until_s = 0.0
            self._stepped_at_s.setdefault(self.present, now)
        self.present, self.hard, self.weave_steps = present, hard, weave_steps
        self._present_steps, self._sliced, self._slice_left_s = 0, set(), 0.0

    def weave(self) -> None:
        """A hard switch pauses older lanes no longer."""
        self.hard = False

    def pause_older(self, now: float) -> None:
        """Requests of older lanes are about to leave: a step of theirs would be made for nothing."""
        self._older_paused_until_s = now + RECALL_S

    def resume_older(self) -> None:
        """It is known which leave."""
        self._older_paused_until_s = 0.0

    def ran(
        self, size: int, now: float, *, more: bool, leads: bool, took_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """A step of the lane `size` has run here; with `more`, its leader goes on at once.

        It took `took_s` without the wait for other members, which was `waited_s`.
        """
        self._stepped_at_s[size] = now
        if not leads:
            self._holds_for_older = size != self.present
            hold_s = HOLD_OLDER_S if self._holds_for_older else HOLD_S
            self._hold_until_s = now + hold_s if more else 0.0
        elif size == self.present:
            self._hold_until_s = 0.0
        if size == self.present:
            self._present_steps += 1
            self._slice_left_s = self._took_s[size] = took_s
            self._sliced.clear()
        else:
            # within a slice members hold: where a later step of it has waited, they did not, and the slice pays
            self._took_s[size] = took_s + (waited_s if size in self._sliced else 0.0)
            self._slice_left_s -= self._took_s[size]
            self._sliced.add(size)
            self._present_steps = 0

    def announce(self, size: int) -> bool:
        """Whether the lane `size`, if it steps now, steps again at once after that, as far as its time slice goes.

        Members hold for it then, and else do not: so an older group goes on only if this said so.
        """
        took_s = self._took_s.get(size, 0.0)
        more = size == self.present or (not self.hard and self._slice_left_s - took_s > took_s / 2)
        (self._announced.add if more else self._announced.discard)(size)
        return more

    def choose(self, now: float, ready: Mapping[int, bool], *, message: bool) -> Action:
        """What to do at `now`: of the lanes led here, by size, `ready` have a step to make; `message`: one waits."""
        paused_s = self._older_paused_until_s - now
        ready_older = [size for size, has_work in ready.items() if has_work and size != self.present]
        older = [] if paused_s > 0 else ready_older
        present_ready = ready.get(self.present, False)
        present_busy = message or present_ready or now < self._hold_until_s
        due = [size for size in older if not present_busy or self._is_due(size, now, present_ready)]
        if due:  # a lane goes on in its time slice: members hold for it
            return StepLane(min(due, key=lambda size: (not self._in_slice(size), self._stepped_at_s.get(size, 0.0))))
        if message:
            return ServeMessage()
        if present_ready and not self.holds(now):
            return StepLane(self.present)
        patience_s = self._patience(older, now, present_ready)
        if ready_older and not older:  # what is announced may never come
            patience_s = paused_s if patience_s is None else min(patience_s, paused_s)
        return Wait(patience_s)

    def holds(self, now: float) -> bool:
        """Whether the present lane waits for the next step of an older group, of which this engine is a member."""
        return self._holds_for_older and now < self._hold_until_s

    def _is_due(self, size: int, now: float, present_ready: bool) -> bool:
        # Time bounds the weave too: other leaders' steps in a third lane start the count of present steps anew. But
        # a pause may be shorter than a step: between two steps of older lanes the present lane gets one.
        paused_s = now - self._stepped_at_s.setdefault(size, now)
        overdue = paused_s >= self.max_pause_s and (self._present_steps > 0 or not present_ready)
        woven = self._present_steps >= self.weave_steps or self._in_slice(size)
        return overdue or (not self.hard and woven)

    def _in_slice(self, size: int) -> bool:
        """Whether an older lane has stepped and most of another step of its fits into the time of the older ones."""
        fits = not self.hard and size in self._sliced and self._slice_left_s > self._took_s[size] / 2
        return fits and (size == 1 or size in self._announced)

    def _patience(self, older: list[int], now: float, present_ready: bool) -> float | None:
        if not older and not present_ready:
            return None
        overdue = older if self._present_steps or not present_ready else []  # others first let the present lane step
        ends = [self._stepped_at_s.get(size, now) + self.max_pause_s for size in overdue]
        return max(0.0, min([self._hold_until_s, *ends]) - now)
