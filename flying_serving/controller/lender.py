"""When groups lend their weights to their KV cache, and when engines have them back."""

from flying_serving.controller.changing import Changing
from flying_serving.controller.commands import Command, FetchWeights, LendWeights
from flying_serving.controller.lending import Stage
from flying_serving.layout.groups import Layout


class Lender(Changing):
    """A dispatcher whose widest groups lend their weights to requests that no group holds else."""

    def _lend(self, now_s: float) -> list[Command]:
        """A request waits that needs it: let a group of the layout lend its weights, if its engines do nothing else."""
        if not self.lending.awaited or Stage.LENDING in self.lending.stages.values():
            return []
        for group in self.layout.groups:
            if self.lending.may_lend(group, self.loads):
                self.lending.begin(group, Stage.LENDING, now_s)
                return [LendWeights(group)]
        return []

    def _fetch(self, now_s: float) -> list[Command]:
        """The layout that is to come, or a request that waits, needs narrower groups: their weights come back."""
        if not self.lending.lends:
            return []
        new = None if self._changeover is None else self._changeover.switch.new
        gone = set() if new is None else {group for group in self.lending.stages if group not in new.groups}
        self.lending.call_back(gone | self._narrow_waits)
        groups = self.lending.to_fetch(self.loads)
        for group in groups:
            self.lending.begin(group, Stage.FETCHING, now_s)
        return [FetchWeights(group) for group in groups]

    def _has_weights(self, layout: Layout) -> bool:
        """Whether the engines of all groups of a layout have the weights that these need."""
        return all(map(self.lending.has_weights, layout.groups))
