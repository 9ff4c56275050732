"""Scenarios in which a request is split: one group computes its first tokens, another pulls their
KV meanwhile.
"""

from __future__ import annotations

from typing import Any

from flying_serving.layout.groups import Group
from tests.with_vllm.protocol.client import Job
from tests.with_vllm.protocol.migrating import MANY, OTHERS, PAIR, job_of
from tests.with_vllm.protocol.scenario import Scenario, Stage
from tests.with_vllm.protocol.settings import Settings

SLOW = Settings(blocks=3, chunk=2)
"""A prompt takes several steps."""
TIGHT, TIGHTER = (
    Settings(blocks=4, chunk=4, stalls=False),
    Settings(blocks=3, chunk=4, stalls=False),
)
"""A few blocks, and nobody gives up only because it takes long."""


def prefix(
    name: str, number: int, first: Group, then: Group, tokens: tuple[int, int] = (3, 4)
) -> tuple[Job, Job]:
    """Return the parts of a request whose prompt is split; `tokens`: of the first part's prompt,
    and of all.
    """
    begun = job_of(name, first, (tokens[0], 1), offer=(number, True))
    return begun, job_of(f"{name}+1", then, (tokens[1], 1), (first, number))


def answer(
    name: str, number: int, first: Group, then: Group, tokens: tuple[int, int] = (2, 2)
) -> tuple[Job, Job, Job]:
    """Return the parts of a request whose answer is split, and how it goes on; `tokens`: of the
    first part.
    """
    begun = job_of(name, first, tokens, offer=(number, True))
    ahead = job_of(f"{name}+1", then, tokens, (first, number), ahead=sum(tokens) - 1)
    return begun, ahead, job_of(f"{name}+1", then, (sum(tokens), 1), (first, number))


def full(first: Group, then: Group, **more: Any) -> Scenario:
    """Return a request of which a group gets as many tokens as it holds: another goes on with its
    KV.
    """
    begun = job_of("a", first, (2, 2), offer=(1, False))
    return Scenario(
        (Stage(jobs=(begun,)),), handoffs={"a": job_of("a+1", then, (4, 1), (first, 1))}, **more
    )


def split_answer(
    first: Group, then: Group, last: Group | None = None, *, stops: bool = False, **more: Any
) -> Scenario:
    """Return a request whose answer is split.

    `last`: the group where it goes on in the end, if that is yet another. `stops`: it ends in the
    first.
    """
    begun, ahead, rest = answer("a", 1, first, then)
    if last is not None:
        rest = job_of("a+2", last, (4, 1), (first, 1))
    return Scenario((Stage(jobs=(begun, ahead)),), handoffs={} if stops else {"a": rest}, **more)


def both_ways(settings: Settings) -> Scenario:
    """Return two requests whose answers are split, each between the same two engines."""
    a, b = answer("a", 1, (0,), (1,), (3, 3)), answer("b", 2, (1,), (0,), (3, 3))
    return Scenario(
        (Stage(jobs=(*a[:2], *b[:2])),), handoffs={"a": a[2], "b": b[2]}, settings=settings
    )


SPLITTING = {
    "a prompt is split, or nobody wants it": Scenario(
        (Stage(jobs=prefix("a", 1, (0,), (1,), (5, 7))),), settings=SLOW, aborts=("a",)
    ),
    "a prompt is split between pairs, beside another request": Scenario(
        (Stage(jobs=(job_of("b", (0,), (1, 2)), *prefix("a", 1, PAIR, OTHERS))),),
        first=(2, 2, 2, 2),
        settings=SLOW,
    ),
    "a prompt is split, and its first part is preempted": Scenario(
        (Stage(jobs=(job_of("b", (0,), (3, 4)), *prefix("a", 1, (0,), OTHERS, (4, 5)))),),
        settings=SLOW,
    ),
    "prompts are split both ways, with little memory": Scenario(
        (Stage(jobs=(*prefix("a", 1, (0,), (1,), (5, 6)), *prefix("b", 2, (1,), (0,), (5, 6)))),),
        settings=TIGHTER,
    ),
    "answers are split both ways, with little memory": both_ways(TIGHT),
    "an answer is split, or nobody wants it": split_answer(
        (0,), (1,), settings=MANY, aborts=("a",)
    ),
    "an answer is split between pairs, or nobody wants it": split_answer(
        PAIR, OTHERS, settings=MANY, aborts=("a",)
    ),
    "a group is full, and a wider one goes on, or nobody wants it": full(
        (0,), PAIR, settings=MANY, aborts=("a",)
    ),
    "an answer is split, and ends in its first part": split_answer(
        (0,), (1,), settings=MANY, stops=True
    ),
    "an answer is split, and goes on elsewhere": split_answer((0,), (1,), (2,), settings=MANY),
    "an owner or a target stops while an answer is split": split_answer(
        (0,), (1,), settings=MANY, mortal=(0, 1)
    ),
}
