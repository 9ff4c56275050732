"""The steps of a group that its leader has planned, and whose outputs it has not taken."""

from flying_serving.engine.messages import Overlap


class OutstandingSteps:
    """The number of outstanding steps of a group, of which `most` may be outstanding at a time.

    A step is outstanding from its plan until its output is taken.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0
        self.is_full = False
        """True if no further step is planned until an output is taken: as many as may be are
        outstanding, or nothing could be planned beside them.
        """

    def __bool__(self) -> bool:
        """Return whether a step is outstanding."""
        return self.count > 0

    @property
    def overlap(self) -> Overlap:
        """The overlap of a step that is planned now."""
        if self._most == 1:
            return Overlap.NONE
        return Overlap.SECOND if self.count else Overlap.FIRST

    def planned(self) -> None:
        """Note a step that was planned."""
        assert not self.is_full
        self.count += 1
        self.is_full = self.count == self._most

    def planned_nothing(self) -> None:
        """Note that nothing could be planned: the next plan needs an output, if one is to come."""
        self.is_full = self.count > 0

    def taken(self) -> None:
        """Note that the output of the oldest step was taken."""
        self.count -= 1
        self.is_full = False

    def clear(self) -> None:
        """Forget all steps: the group has lost a member."""
        self.count, self.is_full = 0, False
