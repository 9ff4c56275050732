"""The tokens that members of a group sample: each keeps its own for the next step, so all must be
the leader's. The same holds for the devices of an engine.

After each step a member notes a checksum of all tokens that it has sampled in the group. The leader
compares it before it gives out tokens of the next step, which were computed from tokens of the
members. The members have noted the step before they take part in the next one. If that one was
planned while the step was outstanding, they note the step right after (`awaited`).

Each device of an engine has a worker of its own, which samples for itself. vLLM's executor hands
the outputs of all of them to the engine. A member whose own devices have sampled different tokens
notes a checksum that no other engine has.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from flying_serving.comm.board import STEPS, StepBoard
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.log import logger

_REMEMBERED_STEPS = 8
"""Steps of which a leader remembers its checksum. A member is few steps ahead or behind."""


class OutputOfDevicesApart(ModelRunnerOutput):
    """The first device's output of a step in which another device has sampled other tokens.

    `apart`: the first such device.
    """

    apart: int


def answer_of(answers: Sequence[Any]) -> Any:
    """Return the answer of an engine whose devices have given these.

    It is the first device's. Outputs of a step are compared: if a device has sampled other tokens
    than the first, an OutputOfDevicesApart is returned.
    """
    first, *others = answers
    if others and isinstance(first, ModelRunnerOutput):
        tokens = first.sampled_token_ids
        for device, answer in enumerate(others, 1):
            # a device that misses a member of the group has no output: the members will be told
            if isinstance(answer, ModelRunnerOutput) and answer.sampled_token_ids != tokens:
                marked = OutputOfDevicesApart(**vars(first))
                marked.apart = device
                return marked
    return first


class SampledTokens:
    """The checksums of one engine, by group size, and what the other members show on the `board`.

    A step counts if it computes tokens. An empty one is no meeting of the members.
    """

    def __init__(self, engine: int, board: StepBoard) -> None:
        self._engine = engine
        self._board = board
        self._checksums: dict[int, deque[tuple[int, int]]] = {}
        """By group size: the number of each of the last steps, and the checksum after it."""
        self._devices_apart: dict[int, str] = {}
        """By group size: which device of this engine has sampled other tokens than the first."""

    def note(self, size: int, output: Any) -> None:
        """Note the tokens of a step's vLLM ModelRunnerOutput, and show the checksum to the group's
        leader.
        """
        checksums = self._of(size)
        last_step, checksum = checksums[-1]
        step = (last_step + 1) % STEPS
        rows = output.sampled_token_ids
        tokens = array("q", chain(map(len, rows), chain.from_iterable(rows)))
        checksum = zlib.crc32(tokens, checksum)
        if isinstance(output, OutputOfDevicesApart) and size not in self._devices_apart:
            self._note_devices(size, output, step)
            checksum ^= 1  # from now on another one than any engine has
        checksums.append((step, checksum))
        self._board.note_sampled(self._engine, size, *checksums[-1])

    def _note_devices(self, size: int, output: OutputOfDevicesApart, step: int) -> None:
        group = aligned_group(self._engine, size)
        self._devices_apart[size] = (
            f"device {output.apart} of engine {self._engine} has sampled other tokens than its "
            f"device 0, in group {list(group)}, by step {step} of the group"
        )
        if group[0] != self._engine:  # the leader says it when it ends the requests
            logger.error("%s", self._devices_apart[size])

    def why_apart(self, group: Group) -> str | None:
        """Return who has sampled other tokens in a group that this engine leads, and by which step:
        a member, or a device of this engine. None if none is known to have.
        """
        if len(group) in self._devices_apart:
            return self._devices_apart[len(group)]
        checksums = dict(self._of(len(group)))
        for member in group[1:]:
            for step, checksum in sorted(self._board.sampled(member, len(group))):
                if checksums.get(step, checksum) != checksum:
                    return (
                        f"engine {member} has sampled other tokens than engine {self._engine}, "
                        f"which leads group {list(group)}, by step {step} of the group"
                    )
        return None

    def awaited(self, group: Group) -> int | None:
        """Return a member that has not noted the step before the last one that is noted here; None
        if all have. This engine leads the group.
        """
        size = len(group)
        before = self._of(size)[-1][0] - 1
        for member in group[1:]:
            steps_since = [(step - before) % STEPS for step, _ in self._board.sampled(member, size)]
            if min(steps_since) >= STEPS // 2:
                return member
        return None

    def begin_anew(self, size: int) -> None:
        """Compare only tokens of later steps."""
        checksums = self._of(size)
        step, _ = checksums[-1]
        checksums.clear()
        checksums.append((step, 0))
        self._devices_apart.pop(size, None)
        self._board.note_sampled(self._engine, size, step, 0)

    def forget(self, size: int) -> None:
        """Forget a group that has lost a member: it begins with its first step again."""
        self._checksums.pop(size, None)
        self._devices_apart.pop(size, None)
        self._board.forget_sampled(self._engine, size)

    def _of(self, size: int) -> deque[tuple[int, int]]:
        if size not in self._checksums:
            self._checksums[size] = deque([(0, 0)], _REMEMBERED_STEPS)
        return self._checksums[size]


def why_logprobs_differ(output: Any) -> str | None:
    """Return which request of a vLLM ModelRunnerOutput has logprobs of another token than its own.

    None if there is no such request, or no logprobs were asked for.

    vLLM's API server would fail with a KeyError, which names only the token.
    """
    logprobs = output.logprobs
    if logprobs is None or logprobs.cu_num_generated_tokens is not None:
        return None
    if logprobs.logprob_token_ids.ndim != 2:  # of the whole vocabulary, in order
        return None
    of_logprobs = logprobs.logprob_token_ids[:, 0].tolist()
    for request_id, tokens, expected in zip(
        output.req_ids, output.sampled_token_ids, of_logprobs, strict=False
    ):
        if tokens and tokens[0] != expected:
            return (
                f"request {request_id} has sampled token {tokens[0]}, "
                f"and its logprobs are of token {expected}"
            )
    return None
