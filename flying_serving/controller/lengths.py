"""Probable lengths of requests. By them groups are chosen, and their room is booked."""

from collections.abc import Sequence

from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.predict.demand import Demand, expected_outputs


class ExpectedLengths:
    """Tokens of requests at their end, by their clients' expectations and by earlier requests."""

    def __init__(self, settings: Settings, demand: Demand) -> None:
        self._settings = settings
        self._demand = demand

    def expected_tokens(self, request: RequestState) -> float:
        """Return the tokens of a request at its end.

        That is its prompt and the outputs that are expected: the number that its client has named,
        else the mean of earlier requests; the number in its plan, if it was planned again. It is
        more than it has got, and at least the tokens that it is sure to have.
        """
        spec, plan = request.spec, request.plan
        expected = spec.expected_tokens or self._demand.output_tokens
        if plan is not None and plan.is_revised:
            expected = plan.output_tokens
        outputs = max(expected, request.output_tokens + 1.0)
        return max(spec.least_tokens, spec.prompt_tokens + min(outputs, spec.max_output_tokens))

    def planned_outputs(self, request: RequestState) -> int:
        """Return the output tokens that a split is planned for.

        They are those that its client expects, or the mean of earlier ones, and a margin. They are
        at least those that it is sure to have.
        """
        spec, mean = request.spec, self._demand.output_tokens
        planned = expected_outputs(mean, spec.max_output_tokens, spec.expected_tokens)
        return max(spec.least_tokens - spec.prompt_tokens, planned)

    def revised_outputs(self, request: RequestState) -> int:
        """Return the output tokens of a request that has more than it was planned for.

        That is the number that it has, and the mean of what running requests of this length still
        get.
        """
        had = request.output_tokens
        left = max(1, round(self._demand.outputs.left(had)))
        return min(had + left, request.spec.max_output_tokens)

    def goes_on(self, request: RequestState) -> bool:
        """Return whether another group may go on with a request that has filled its group."""
        return request.spec.may_change_group and not self._settings.loses_groups

    def set_sizes_of_new(self, request: RequestState, formable: Sequence[int]) -> RequestState:
        """Set the group sizes of a request that arrives (see `sizes`), and its likely length."""
        expected = self.expected_tokens(request)
        request.likely_tokens = (
            expected if self.goes_on(request) else max(expected, request.spec.longest_tokens)
        )
        request.sizes = self.sizes(request, request.sizes, formable)
        return request

    def sizes(
        self, request: RequestState, holding: Sequence[int], formable: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the group sizes for a request, of the sizes `holding` it.

        Where a group is formed for the request, it holds the expected tokens, if the engines that
        are there can form one (`formable`). Otherwise the request goes on in a wider group when it
        fills its own, or ends there.
        """
        if not self._settings.forms_groups or request.spec.degree is not None:
            return tuple(holding)
        most_tokens = self._settings.capacity.most_tokens
        needed = min(
            self.expected_tokens(request), max((most_tokens[size] for size in formable), default=0)
        )
        return tuple([size for size in holding if most_tokens[size] >= needed])
