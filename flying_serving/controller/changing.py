"""The switch under way: at most one, until all engines have answered its order or it is not made after all."""

from flying_serving.controller.commands import Command, Weave
from flying_serving.controller.placing import Placing
from flying_serving.controller.settings import Settings
from flying_serving.controller.splitter import Splitter
from flying_serving.controller.switches import Changeover, Switch


class Changing(Splitter):
    """A dispatcher whose layout may be about to change."""

    def __init__(self, settings: Settings, placing: Placing | None) -> None:
        super().__init__(settings, placing)
        self._changeover: Changeover | None = None
        self._pauses_older = False  # whether engines pause older lanes, as a hard switch was the last

    @property
    def changing(self) -> bool:
        """Whether a switch is under way: it waits for old requests or for the engines' answers."""
        return self._changeover is not None

    @property
    def _held(self) -> bool:
        """Whether the switch under way keeps requests waiting."""
        return self._changeover is not None and self._changeover.holds

    @property
    def waits_for_idle(self) -> Switch | None:
        """The switch under way, as long as no engine knows of it: it waits for old requests to end."""
        change = self._changeover
        return change.switch if change is not None and not change.is_ordered else None

    def is_changing(self, switch: Switch) -> bool:
        """Whether this switch is under way; it is not, whatever engines answer, once one of them was lost."""
        return self._changeover is not None and self._changeover.switch is switch

    def failed(self, switch: Switch, problem: str, now_s: float) -> None:
        """Some engine did not answer the order."""
        if self.is_changing(switch):
            switch.failed(problem, now_s)
            self._end_change()

    def _end_pause(self) -> list[Command]:
        """A switch that waits for old requests to end waits for none that a hard switch has paused."""
        if self.waits_for_idle is None or not self._pauses_older:
            return []
        self._pauses_older = False
        return [Weave(frozenset(self.layout.engines))]

    def _end_change(self) -> None:
        self._changeover = None
        self.switches.prune()
