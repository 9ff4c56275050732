"""The choice of the lane that an engine steps next: the weave, pure. Time is an argument.

An engine may have work in several lanes at once. Its *present* lane is the one whose group the
layout names. Lanes of older layouts still drain. It also has messages: steps that other leaders
planned.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HOLD_S = 0.05
"""Seconds that a member holds for the next step of its present group after the leader announced
more.
"""
PAUSE_OLDER_S = 0.5
"""Seconds that older lanes pause after an order with which requests migrate, until the API server
says which.
"""
HOLD_OLDER_S = 0.005
"""Seconds that a member holds for an older group within its time slice: short, as the last request
may just have ended.
"""


@dataclass(frozen=True)
class ServeMessage:
    """Handle the next message of the channel."""


@dataclass(frozen=True)
class StepLane:
    """Step a lane that this engine leads: run it (size 1), or plan a step of its group."""

    size: int


@dataclass(frozen=True)
class Wait:
    """Wait until a message comes, or for at most `timeout_s`: there is nothing to do."""

    timeout_s: float | None


Action = ServeMessage | StepLane | Wait


class Slice:
    """The time of the older lanes between two steps of the present lane: as long as the first took.

    A lane whose step has begun in the slice goes on in it, as long as most of another step fits.
    Members hold for a group of several only if its leader announced that it goes on.
    """

    def __init__(self) -> None:
        self.left_s = 0.0
        self.step_s: dict[int, float] = {}
        """Seconds of the last step of each lane, by group size."""
        self._stepped: set[int] = set()
        """Older lanes that have stepped in this slice."""
        self._announced: set[int] = set()
        """Lanes whose members hold for the next step."""

    def begin(self, present: int, took_s: float) -> None:
        """Begin a slice as long as the step that the present lane has made."""
        self.step_s[present] = took_s
        self.left_s = took_s
        self._stepped.clear()

    def spend(self, size: int, took_s: float, waited_s: float) -> None:
        """Take the time of an older lane's step from the slice.

        The first wait for members is free. Within the slice they hold for the lane: where a later
        step has waited, members did other work, and the slice pays.
        """
        self.step_s[size] = took_s + waited_s if size in self._stepped else took_s
        self.left_s -= self.step_s[size]
        self._stepped.add(size)

    def end(self) -> None:
        """End the slice: no older lane goes on in it."""
        self.left_s = 0.0
        self._stepped.clear()

    def fits_two(self, size: int) -> bool:
        """Return whether most of a second step fits, if a lane steps now."""
        step_s = self.step_s.get(size, 0.0)
        return self.left_s - step_s > step_s / 2

    def announce(self, size: int, *, goes_on: bool) -> None:
        """Note whether the lane steps again at once after this step, as the members of its group
        are told.
        """
        if goes_on:
            self._announced.add(size)
        else:
            self._announced.discard(size)

    def continues(self, size: int) -> bool:
        """Return whether an older lane steps again now: it began, most of a step fits, members
        hold.
        """
        if size not in self._stepped or self.left_s <= self.step_s[size] / 2:
            return False
        return size == 1 or size in self._announced


class LaneArbiter:
    """Chooses the next action of an engine.

    A weave shares time, not steps: a change from one lane to another may have to wait for engines
    that do other work. So after a long step of the present lane (a chunk of prompts) an older lane
    makes several short ones (decodes). Members hold for them, too. The wait for other members
    counts for neither lane; where members do not hold, it counts for the older lane.

    After `weave_steps` steps of the present lane an older one gets as much time as one of them
    took. It gets a step at least every `max_pause_s`, and under a hard switch only that often.
    """

    def __init__(self, weave_steps: int, max_pause_s: float) -> None:
        self.present = 1
        self.hard = False
        self.weave_steps = weave_steps
        self.max_pause_s = max_pause_s
        self._present_steps = 0
        self._slice = Slice()
        self._stepped_at_s: dict[int, float] = {}
        self._hold_until_s = 0.0
        self._holds_for_older = False
        self._older_paused_until_s = 0.0

    def switch(self, present: int, *, hard: bool, weave_steps: int, now_s: float) -> None:
        """Change the layout: `present` is the size of this engine's group from now on."""
        if present != self.present:
            self._hold_until_s = 0.0
            self._stepped_at_s.setdefault(self.present, now_s)
        self.present, self.hard, self.weave_steps = present, hard, weave_steps
        self._present_steps = 0
        self._slice.end()

    def weave(self) -> None:
        """Let a hard switch pause older lanes no longer."""
        self.hard = False

    def pause_older(self, now_s: float) -> None:
        """Pause older lanes: their requests are about to leave, and a step would be wasted on
        them.
        """
        self._older_paused_until_s = now_s + PAUSE_OLDER_S

    def resume_older(self) -> None:
        """Resume older lanes: the API server has said which requests leave."""
        self._older_paused_until_s = 0.0

    def ran(
        self,
        size: int,
        now_s: float,
        *,
        more: bool,
        leads: bool,
        took_s: float = 0.0,
        waited_s: float = 0.0,
    ) -> None:
        """Note that a step of the lane `size` has run here; with `more`, its leader goes on at
        once.

        It took `took_s` without the wait for other members, which was `waited_s`.
        """
        self._stepped_at_s[size] = now_s
        if not leads:
            self._holds_for_older = size != self.present
            hold_s = HOLD_OLDER_S if self._holds_for_older else HOLD_S
            self._hold_until_s = now_s + hold_s if more else 0.0
        elif size == self.present:
            self._hold_until_s = 0.0
        if size == self.present:
            self._present_steps += 1
            self._slice.begin(size, took_s)
        else:
            self._present_steps = 0
            self._slice.spend(size, took_s, waited_s)

    def announce(self, size: int) -> bool:
        """Return whether the lane `size`, if it steps now, may step again at once after that.

        Its members hold for it only then, so an older group goes on only if this said so.
        """
        goes_on = size == self.present or (not self.hard and self._slice.fits_two(size))
        self._slice.announce(size, goes_on=goes_on)
        return goes_on

    def choose(self, now_s: float, ready: Mapping[int, bool], *, message: bool) -> Action:
        """Choose the next action at `now_s`.

        `ready`: by size, whether a lane that is led here has a step to make. `message`: True if one
        waits.
        """
        present_ready = ready.get(self.present, False)
        older = [size for size, is_ready in ready.items() if is_ready and size != self.present]
        paused_s = self._older_paused_until_s - now_s
        steppable = older if paused_s <= 0 else []

        # an older lane steps when it is due, or when nothing but older lanes has work
        present_busy = message or present_ready or now_s < self._hold_until_s
        due = steppable
        if present_busy:
            due = [size for size in steppable if self._is_due(size, now_s, present_ready)]
        if due:
            return StepLane(min(due, key=self._precedence))

        # other engines wait for a message, and for no step of the present lane
        if message:
            return ServeMessage()
        if present_ready and not self.holds(now_s):
            return StepLane(self.present)

        patience_s = self._patience_s(steppable, now_s, present_ready)
        if older and not steppable:  # the order for which older lanes pause may never come
            patience_s = paused_s if patience_s is None else min(patience_s, paused_s)
        return Wait(patience_s)

    def holds(self, now_s: float) -> bool:
        """Return whether the present lane waits for the next step of an older group, of which this
        engine is a member.
        """
        return self._holds_for_older and now_s < self._hold_until_s

    def _is_due(self, size: int, now_s: float, present_ready: bool) -> bool:
        """Return whether an older lane steps before the present one."""
        # Time bounds the weave too: other leaders' steps in a third lane start the count of present
        # steps anew. But a pause may be shorter than a step: between two steps of older lanes the
        # present lane gets one.
        paused_s = now_s - self._stepped_at_s.setdefault(size, now_s)
        if paused_s >= self.max_pause_s and (self._present_steps > 0 or not present_ready):
            return True
        is_woven = self._present_steps >= self.weave_steps
        return not self.hard and (is_woven or self._slice.continues(size))

    def _precedence(self, size: int) -> tuple[bool, float]:
        """Return a key for due lanes, of which the least steps: one that continues its slice, then
        the longest paused.
        """
        continues = not self.hard and self._slice.continues(size)
        return not continues, self._stepped_at_s.get(size, 0.0)

    def _patience_s(self, older: list[int], now_s: float, present_ready: bool) -> float | None:
        """Return the seconds until a lane may be due; None if no lane has a step to make."""
        if not older and not present_ready:
            return None
        ends_s = [self._hold_until_s]
        if self._present_steps or not present_ready:  # otherwise the present lane steps first
            ends_s += [self._stepped_at_s.get(size, now_s) + self.max_pause_s for size in older]
        return max(0.0, min(ends_s) - now_s)
