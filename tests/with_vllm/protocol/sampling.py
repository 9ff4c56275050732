"""Members of a group that sample other tokens than their leader: what the model knows of it, and
what must hold.

A member may do so in any step, and then does so for all requests of the step. Its checksum is
another one from then on, until it begins anew. The model knows which members that are, whatever
their checksums say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from flying_serving.engine.sampled import SampledTokens
from flying_serving.layout.groups import Group
from tests.explorer import Wrong
from tests.with_vllm.protocol.events import Event

if TYPE_CHECKING:
    from tests.with_vllm.protocol.automaton import Facts

STEP_NUMBERS = 3
"""In place of STEPS: a member may be a step ahead or behind, so three tell them apart."""
OTHER = ModelRunnerOutput([], {}, [[1]])
"""The output of a member that has sampled other tokens."""
Seen = tuple[tuple[int, tuple[int, int]], ...]
"""By engine, the step and the checksum that it shows."""


class Draw(NamedTuple):
    """What an engine samples in a step, and what a leader sees of its members at the end of it.

    `is_other`: whether it samples other tokens than its leader.
    """

    is_other: bool = False
    seen: Seen = ()


class Samples:
    """What one engine has sampled in its groups, by size: `noted` is what it shows others, `begun`
    how often it has begun anew. In `apart` groups it has sampled other tokens since.
    """

    def __init__(self) -> None:
        self.noted: dict[int, tuple[int, int]] = {}
        self.begun: dict[int, int] = {}
        self.apart: set[int] = set()
        self.is_other = False
        self.seen: dict[int, tuple[int, int]] = {}

    def begin_step(self, draw: Draw) -> None:
        """Sample these tokens from now on, and see this of others."""
        self.is_other, self.seen = draw.is_other, dict(draw.seen)

    def output(self, size: int, plan: Any) -> ModelRunnerOutput:
        """Return the output of a step."""
        if not self.is_other or not plan.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.apart.add(size)
        return OTHER

    def begin_anew(self, size: int, times: int) -> None:
        """Sample the leader's tokens again, as the workers do with other random numbers."""
        self.begun[size] = times
        self.apart.discard(size)

    def forget_steps(self, sampled: SampledTokens) -> None:
        """Remember the last two steps, of which a leader needs one."""
        for checksums in sampled._checksums.values():
            while len(checksums) > 2:
                checksums.popleft()


def draws(
    group: Group, diverging: Sequence[int], facts: Sequence[tuple[int, Facts]]
) -> Iterator[tuple[int | None, Group]]:
    """Yield who may sample other tokens in a step, and in which order the members may end it.

    The order makes a difference only if a member is apart, or comes to be so. Who is apart stays
    so, whatever it samples.
    """
    apart = {engine for engine, of_engine in facts if len(group) in of_engine.samples.apart}
    others = [engine for engine in group[1:] if engine in diverging and engine not in apart]
    for other in (None, *others):
        yield other, group
        if other is not None or apart:
            yield other, group[::-1]


def check_outputs(event: Event, group: Group, before: Sequence[tuple[int, Facts]]) -> None:
    """Check the end of a step: tokens are given out if no member was apart before, and else all
    requests end. Raises Wrong.
    """
    if event.wrong is not None:
        return
    apart = [engine for engine, facts in before if len(group) in facts.samples.apart]
    if apart and event.given:
        raise Wrong(
            f"tokens of {event.given} were given out, though {apart} had sampled others",
            event.label,
        )
    if event.failed and not apart and event.label[0] != "step apart":
        raise Wrong(f"{event.failed} ended, though members have sampled the same", event.label)


def check_samples(group: Group, members: Sequence[tuple[int, Facts]]) -> None:
    """Check that members at rest have begun anew equally often, have made as many steps, and that
    the board says who is apart. Raises Wrong.
    """
    size = len(group)
    samples = [facts.samples for _, facts in members]
    begun = {of_member.begun.get(size, 0) for of_member in samples}
    if len(begun) > 1:
        raise Wrong(f"members of {group} have begun anew {sorted(begun)} times")
    steps = {of_member.noted[size][0] for of_member in samples}
    if len(steps) > 1:
        raise Wrong(f"members of {group} have made {sorted(steps)} steps")
    for engine, facts in members:
        differs = facts.samples.noted[size][1] != samples[0].noted[size][1]
        if differs != (size in facts.samples.apart):
            raise Wrong(f"the checksum of engine {engine} in {group} says it is apart: {differs}")
