"""A device of an engine, which writes down whose token is in which block."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from flying_serving.parallelism import Parallelism
from flying_serving.vllm_adapter.model_runner.device_lane import OutputUse, VoidStep
from tests.with_vllm.vllm_adapter.kv_lanes import BLOCK, token


class TokenWriter:
    """A device of one engine: it computes a step when the step is launched.

    `kv`: by physical block and place in it, the token whose KV is there. `await_members`: called
    with the number of a group's step before its output is there.
    """

    def __init__(self, await_members: Callable[[int], None]) -> None:
        self._await_members = await_members
        self.kv: dict[tuple[int, int], int] = {}
        self.kept: deque[Any] = deque()
        self.most_kept = 0
        self.launched = 0
        self.parallelisms: list[Parallelism] = []
        """Of each step that was planned."""
        self.loses_member = False
        self.token_offset = 0
        """Added to each token that is sampled from now on, until the members begin anew."""
        self.begun_anew: list[int] = []
        self._tables: dict[str, list[int]] = {}
        self._prompts: dict[str, list[int]] = {}

    def execute(
        self,
        size: int,
        plan: Any,
        grammar: Any,
        use: OutputUse,
        parallelism: Parallelism = Parallelism.TENSOR,
    ) -> Any:
        """Compute a step, as `DeviceLane.execute`."""
        self.parallelisms.append(parallelism)
        if self.loses_member and size > 1:
            return VoidStep("engine 1 is lost")
        self._update(plan)
        output = self._compute(plan)
        if size == 1:
            return output
        self.launched += 1
        if use is OutputUse.RETURNED:
            self._await_members(self.launched)
            return output
        self.kept.append((self.launched, output))
        self.most_kept = max(self.most_kept, len(self.kept))
        return None

    def take_output(self, size: int) -> Any:
        """Return the oldest kept output, as `DeviceLane.take_output`."""
        step, output = self.kept.popleft()
        if self.loses_member:
            return VoidStep("engine 1 is lost")
        self._await_members(step)
        return output

    def rejoin(self, size: int, incarnations: list[int]) -> None:
        """Step with members that are there again, as `DeviceLane.rejoin`."""
        self.loses_member, self.launched = False, 0

    def begin_anew(self, size: int, times: int) -> None:
        """Sample right tokens again, as `DeviceLane.begin_anew` draws other random numbers."""
        self.token_offset = 0
        self.begun_anew.append(times)

    def leave(self, size: int) -> None:
        """Forget all requests, as `DeviceLane.leave`."""
        self.kept.clear()
        self._tables.clear()

    def has(self, blocks: Sequence[int], place: int) -> int | None:
        """Return the token whose KV is at a place of a request with these blocks."""
        return self.kv.get((blocks[place // BLOCK], place % BLOCK))

    def _update(self, plan: Any) -> None:
        self._computed: dict[str, tuple[int, int]] = {}
        for name in plan.finished_req_ids:
            self._tables.pop(name, None)
        for new in plan.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._prompts[new.req_id] = new.prompt_token_ids
            self._computed[new.req_id] = new.num_computed_tokens, 0
        cached = plan.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[place]
            if name in cached.resumed_req_ids:
                self._tables[name] = []
            self._tables[name] += blocks[0] if blocks is not None else []
            computed, outputs = cached.num_computed_tokens[place], cached.num_output_tokens[place]
            self._computed[name] = computed, outputs

    def _compute(self, plan: Any) -> ModelRunnerOutput:
        names = list(plan.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            (computed, outputs), prompt = self._computed[name], self._prompts[name]
            family, blocks = prompt[0] // 100, self._tables[name]
            for place in range(computed):
                assert self.has(blocks, place) == token(family, place), (name, place)
            stop = computed + plan.num_scheduled_tokens[name]
            for place in range(computed, stop):
                self.kv[blocks[place // BLOCK], place % BLOCK] = token(family, place)
            is_last = stop >= len(prompt) + outputs
            sampled.append([token(family, stop) + self.token_offset] if is_last else [])
        places = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled)
