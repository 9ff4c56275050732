"""The price of a request in a group, in request-seconds: its own latency there, and what requests
that run there lose by it.

Seconds of an urgent request count `URGENCY` times, whether it waits for the group or runs there. So
others leave a group to an urgent request only as long as they lose less elsewhere.
"""

from dataclasses import dataclass

from flying_serving.controller.loads import GroupWork
from flying_serving.controller.requests import RequestState
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import LaneFigures, weight

SHORTEST_S = 1e-6
"""Shorter than any step. A lane's figures are fitted, and may be 0."""


@dataclass(frozen=True)
class Assignment:
    """A request in a group that it might get.

    Args:
        request: the request.
        work: of the group, without the request.
        drained: requests of older groups that the group's engines step in between.
        tokens: of the request at its end, as expected.
        migration: the cost of migrating its KV to the group, None without KV.
        max_variants: variants of the model that the group has in a step.
        waits_in_queue: where `max_num_seqs` requests run, it waits until one of them has ended.
    """

    request: RequestState
    work: GroupWork
    drained: int
    tokens: float
    migration: MigrationCost | None
    max_variants: int = 0
    waits_in_queue: bool = True

    @property
    def running(self) -> float:
        """Return the number of requests that run in the group; an urgent one counts as URGENCY."""
        return self._count + (weight(urgent=True) - 1) * self.work.urgent

    def price_s(self, lane: LaneFigures) -> float:
        """Return the price. `lane`: the abilities of the group.

        A first token that comes twice as late as in an idle group counts as twice the latency. So
        the request goes behind prompts only to spare others more than that.
        """
        first_token_s = self.first_token_s(lane)
        idle_s = max(SHORTEST_S, lane.step_s(self._to_prefill, 0, 0))
        own_s = (first_token_s + self._stream_s(lane)) * first_token_s / idle_s
        own_weight = weight(urgent=self.request.spec.urgent)
        return own_weight * own_s + self.running * self._delay_s(lane)

    def first_token_s(self, lane: LaneFigures) -> float:
        """Return the seconds to the request's first token, migration included."""
        first_s = lane.step_s(self.work.prefill_tokens + self._to_prefill, self._count, 0)
        drained_s = lane.cost.fixed_s * self.drained
        kv_tokens = self.request.context_tokens
        migration_s = 0.0 if self.migration is None else self.migration.seconds(kv_tokens)
        return first_s + drained_s + migration_s + self._queue_s(lane) + self._variant_s(lane)

    def _queue_s(self, lane: LaneFigures) -> float:
        """Return the seconds that the request waits in the group's queue.

        Requests that run end one after the other, each after as many tokens as this one gets.
        """
        max_num_seqs = lane.max_num_seqs
        ends = self._count - max_num_seqs + 1
        if ends <= 0 or not self.waits_in_queue:
            return 0.0
        step_s = lane.step_s(0, max_num_seqs, self._running_tokens)
        return ends / max_num_seqs * self._outputs * step_s

    def _variant_s(self, lane: LaneFigures) -> float:
        """Return the seconds until the group may load the variant of the request: those of another
        one have to end.
        """
        variant, running = self.request.spec.variant, self.work.variants.keys() - {None}
        if variant is None or variant in running or len(running) < self.max_variants:
            return 0.0
        return self._stream_s(lane)

    def _stream_s(self, lane: LaneFigures) -> float:
        """Return the seconds from the request's first token to its end."""
        context_tokens = self._running_tokens + self.request.context_tokens
        return self._outputs * lane.step_s(0, self._count + 1, context_tokens)

    def _delay_s(self, lane: LaneFigures) -> float:
        """Return the seconds that each running request loses, as its steps have one more sequence.

        The prompt is left out: it takes a few steps, and delays some group wherever it goes.
        """
        without_s = lane.step_s(0, self._count, 0)
        with_s = lane.step_s(0, self._count + 1, self.request.context_tokens)
        return self._outputs * (with_s - without_s)

    @property
    def _count(self) -> int:
        return len(self.work.requests)

    @property
    def _to_prefill(self) -> int:
        return self.request.to_prefill(with_kv=self.migration is not None)

    @property
    def _outputs(self) -> float:
        """Return the tokens that the request is still to get."""
        return max(1.0, self.tokens - self.request.context_tokens)

    @property
    def _running_tokens(self) -> int:
        """Return the context tokens of all requests that run there."""
        return self.work.prompt_tokens + self.work.output_tokens
