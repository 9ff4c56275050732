"""How long requests will probably be: what a group is chosen by and its room is booked by, not what they may take."""

from collections.abc import Sequence

from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.predict.demand import Demand


class ExpectedLengths:
    """Tokens that requests will probably have at their end, by what their clients say and by what others have had."""

    def __init__(self, settings: Settings, demand: Demand) -> None:
        self._settings = settings
        self._demand = demand

    def tokens(self, state: RequestState) -> float:
        """Tokens at its end: its prompt, and as many outputs as its client expects or as requests have had, or more.

        At least those that it is sure to have.
        """
        spec = state.spec
        outputs = max(spec.expected_tokens or self._demand.output_tokens, state.output_tokens + 1.0)
        return max(spec.tokens, spec.prompt_tokens + min(outputs, spec.max_output_tokens))

    def goes_on(self, state: RequestState) -> bool:
        """Whether another group may go on with a request that has as many tokens as its group holds."""
        return state.spec.may_change_group and not self._settings.loses_groups

    def of_new(self, state: RequestState, formable: Sequence[int]) -> RequestState:
        """Set which group sizes are for a request that arrives (see `sizes`), and how long it will probably be."""
        expected = self.tokens(state)
        state.likely_tokens = expected if self.goes_on(state) else max(expected, state.spec.longest_tokens)
        state.sizes = self.sizes(state, state.sizes, formable)
        return state

    def sizes(self, state: RequestState, holding: Sequence[int], formable: Sequence[int]) -> tuple[int, ...]:
        """Which of the group sizes that hold a request are for it.

        Where a group is formed for it, that is one which holds what is expected of it, if engines that are there can
        form one: `formable`. Else it goes on in a wider group when it fills its own, or ends there.
        """
        if not self._settings.forms_groups or state.spec.degree is not None:
            return tuple(holding)
        most_tokens = self._settings.capacity.most_tokens
        needed = min(self.tokens(state), max((most_tokens[size] for size in formable), default=0))
        return tuple([size for size in holding if most_tokens[size] >= needed])
