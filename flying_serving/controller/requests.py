"""The controller's knowledge of a request, waiting or running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flying_serving.controller.suspicion import TRUSTED, Suspicion
from flying_serving.layout.groups import Group, KVSource, Layout
from flying_serving.policy.split import PlannedLength


@dataclass(frozen=True)
class RequestSpec:
    """The request of a client.

    Args:
        prompt_tokens: of its prompt.
        least_tokens: tokens of prompt and output that it is sure to have: its prompt and one token,
            or the requested least output (`min_tokens`, `ignore_eos`).
        max_output_tokens: upper bound of its output.
        degree: the TP degree that it asks for (`tp_degree`).
        priority: as in vLLM, lower is more urgent. Below 0 is urgent: see `controller.price`.
        deadline_s: longest wait until a scheduler has it in a step: see `Deadlines`.
        can_migrate: whether another group can go on with it, with its KV or after prefilling prompt
            and outputs again.
        expected_tokens: output tokens that its client expects.
        split_at: the token of prompt and output at which it asks to be split over two groups.
        prompt_splits: whether a split may be inside the prompt.
        most_tokens: prompt and max_tokens together, which some group has to hold. None without
            max_tokens: then it may be as long as its group holds.
        variant: the number of the variant of the model that it asks for; None: the model itself.
    """

    prompt_tokens: int
    least_tokens: int
    max_output_tokens: int = 1
    degree: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    can_migrate: bool = True
    expected_tokens: int | None = None
    split_at: int | None = None
    prompt_splits: bool = True
    most_tokens: int | None = None
    variant: int | None = None

    @property
    def longest_tokens(self) -> int:
        """Tokens that some group has to hold, or the request is refused."""
        return max(self.least_tokens, self.most_tokens or 0)

    @property
    def urgent(self) -> bool:
        """True if it asks for a group at once."""
        return self.priority < 0

    @property
    def may_change_group(self) -> bool:
        """True if any group may go on with it: it can migrate, and asks for no degree."""
        return self.can_migrate and self.degree is None

    @property
    def needed_tokens(self) -> int:
        """Tokens that its group has to hold: all that it may take, if no other group can go on with
        it.
        """
        return self.least_tokens if self.may_change_group else self.longest_tokens


@dataclass(frozen=True)
class Origin:
    """The call and the event of a request.

    `call`: the client's call that it belongs to, by which slots were reserved; its `n` outputs
    are of one call. None: none were. `event`: names the requests that it comes together with, as
    all prompts of one HTTP request. None: it is alone.
    """

    call: str | None = None
    event: str | None = None


ALONE = Origin()


@dataclass
class RequestState:
    """A request from its arrival to its end.

    Args:
        request_id: vLLM's.
        spec: the request as its client sent it.
        sizes: group sizes that it may have, narrow first.
        order: number of its arrival.
        arrived_s: time of its arrival, by the controller's clock.
        group: that has it; None while it waits.
        output_tokens: that it has got so far.
        prefill_tokens: prompt tokens that its group has not finished yet, 0 after the first token.
        likely_tokens: of prompt and output at its end; groups that have room and hold them come
            first.
        admitted: whether some group had it.
        committed_tokens: tokens of prompt and output that are booked for it in its group.
        kv: where it waits, the offer of its KV; where it runs, the one that it came with; None if
            there is none.
        offer: the number under which its group offers its KV when it ends there, if it may go on
            elsewhere then.
        plan: the length that its split was planned for; None if no split of it was planned.
        suspicion: of the losses of its groups.
    """

    request_id: str
    spec: RequestSpec
    sizes: tuple[int, ...]
    order: int
    arrived_s: float
    group: Group | None = None
    output_tokens: int = 0
    prefill_tokens: int = 0
    likely_tokens: float = 0.0
    admitted: bool = False
    committed_tokens: float = 0.0
    kv: KVSource | None = None
    offer: int | None = None
    plan: PlannedLength | None = None
    suspicion: Suspicion = TRUSTED

    @property
    def context_tokens(self) -> int:
        """Tokens that it has: its prompt and its outputs so far."""
        return self.spec.prompt_tokens + self.output_tokens

    @property
    def is_new(self) -> bool:
        """True if nothing of it was computed, as far as is known."""
        return self.kv is None and not self.output_tokens and not self.losses

    @property
    def losses(self) -> int:
        """Number of times that its group lost an engine that may have computed its prompt."""
        return self.suspicion.losses

    @property
    def is_suspect(self) -> bool:
        """True if it may be the cause of lost engines, in the group that it has or waits for."""
        return self.suspicion.max_suspects is not None

    @property
    def stays(self) -> bool:
        """True if it leaves its group only when it has to: it may have killed engines."""
        return self.is_suspect or self.suspicion.rests

    @property
    def needed_tokens(self) -> int:
        """Tokens that it needs room for. An open-ended request needs room for its next token."""
        needed = self.spec.needed_tokens
        return max(needed, self.context_tokens + 1) if self.output_tokens else needed

    def lacks_group(self, layout: Layout) -> bool:
        """Return whether it asks for a degree that no group of `layout` has."""
        return self.spec.degree is not None and all(
            len(group) not in self.sizes for group in layout.groups
        )

    def is_wider_than(self, layout: Layout) -> bool:
        """Return whether it asks for a higher degree than any group of `layout` has."""
        widest = max(map(len, layout.groups), default=0)
        return self.lacks_group(layout) and self.sizes[0] > widest

    def to_prefill(self, *, with_kv: bool) -> int:
        """Return the prompt tokens that a group has to compute: all, or with its KV the rest of the
        group before it.
        """
        return max(1, self.prefill_tokens) if with_kv else self.context_tokens

    def fitting(self, tokens: Mapping[int, int]) -> tuple[int, ...]:
        """Return its sizes that still hold its present tokens and one token more; `tokens` by group
        size.
        """
        context = self.context_tokens
        return tuple([size for size in self.sizes if tokens[size] > context])
