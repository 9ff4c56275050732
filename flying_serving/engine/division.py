"""What the members of the groups that an engine leads divide in each step."""

from typing import Any

from flying_serving.engine.group import Leader
from flying_serving.engine.steps import StepLog
from flying_serving.layout.parallelism import Parallelism
from flying_serving.scheduling.ways import StepWays
from flying_serving.vllm_adapter.step_contents import contents


class StepDivision:
    """Chooses for each step of one group, which this engine leads, what its members divide.

    `ways`: it knows what was measured. `steps`: learns of the choice.
    """

    def __init__(self, leader: Leader, ways: StepWays, steps: StepLog) -> None:
        self._group = leader.group
        self._ways = ways
        self._steps = steps
        self._least_tokens = ways.least_tokens(leader.size)

    def parallelism_of(self, plan: Any) -> Parallelism:
        """Return what the members divide in a step. `plan`: its SchedulerOutput."""
        if plan.total_num_scheduled_tokens < self._least_tokens:
            return Parallelism.TENSOR
        parallelism = self._ways.choose(len(self._group), *contents(plan))
        if parallelism is Parallelism.TOKEN:
            self._steps.divides_tokens(self._group)
        return parallelism
