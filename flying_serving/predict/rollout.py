"""One group of several, rolled out: what becomes of its work in a few coarse steps.

Work is a fluid: prompts wait, are taken in as fast as steps allow while slots are free, and stream until they end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from flying_serving.predict.work import Interference, LaneFigures, Work

_MOST_USED = 0.85
"""What would grow without bound has no time to do so within the horizon."""
_SPREAD = 0.65
"""(1 + c^2) / 2 for lengths whose standard deviation is c = 0.55 of their mean: how much longer a queue gets for it."""


class FluidFigures(NamedTuple):
    """Request-seconds of one group in its queue, before a first token once taken, and streaming; and its means."""

    queued_s: float
    first_s: float
    streamed_s: float
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)  # not frozen: made for every layout that is judged, and that takes three times as long
class FluidModel:
    """One group of several, and the work that it gets: what does not change while it is rolled out.

    `most`: requests that it can run, `most_woven` while an older group holds memory. `request_s`: what one that decodes
    adds to a step. `parts`: tokens of prompts and seconds of steps with nobody that decodes, without what their first
    tokens cost more: alone, with (a chunk of) one prompt, and with all it can take.
    """

    lane: LaneFigures
    interference: Interference
    groups: int
    prompt: float
    outputs: float
    budget: float
    chunks: float
    most: float
    most_woven: float
    request_s: float
    parts: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

    @classmethod
    def of(cls, lane: LaneFigures, groups: int, work: Work, interference: Interference) -> FluidModel:
        """A group's share of the work."""
        cost, prompt, outputs, budget = lane.cost, work.prompt_tokens, max(1.0, work.output_tokens), lane.budget_tokens
        tokens, held = prompt + outputs, interference.held_tokens / groups
        most = max(1.0, min(lane.slots, lane.kv_tokens / tokens))
        most_woven = max(1.0, min(lane.slots, (lane.kv_tokens - held) / tokens)) if held else most
        request_s = cost.sequence_s + cost.context_token_s * (prompt + outputs / 2)
        before, chunk = lane.tokens_before(prompt), min(prompt, budget)
        # a prompt's token reads those computed before its step, a step's start all that its prompts have
        token_s = cost.prefill_token_s + before * (cost.prefill_pair_s + cost.context_token_s / chunk)
        fixed_s = cost.fixed_s
        parts = (0.0, fixed_s), (chunk, fixed_s + token_s * chunk), (budget, fixed_s + token_s * budget)
        chunks = max(1.0, prompt / budget)
        return cls(lane, interference, groups, prompt, outputs, budget, chunks, most, most_woven, request_s, parts)

    def slots(self, now_s: float) -> float:
        """Requests that it can run."""
        return self.most if now_s >= self.interference.woven_s else self.most_woven

    def times(self, crowd: float) -> tuple[float, float, float]:
        """Seconds of a step with `crowd` requests: alone, with (a chunk of) one prompt, and with all it can take."""
        (none, base_s), (chunk, single_s), (most, full_s) = self.parts
        first_s, decode_s = self.lane.cost.first_tokens_s, crowd * self.request_s
        return (
            base_s + decode_s + first_s(none + crowd),
            single_s + decode_s + first_s(chunk + crowd),
            full_s + decode_s + first_s(most + crowd),
        )

    def roll(self, spans: list[tuple[float, float]], now_s: float, queue: float, running: float) -> FluidFigures:
        """Let spans of time pass, each with its arrivals per second: prompts are taken, requests stream and end.

        Streaming requests are in two stages of half their output each, so that those that have just begun do not end
        at once.
        """
        interference, outputs, chunks = self.interference, self.outputs, self.chunks
        full_prompts = self.budget / self.prompt
        early = late = running / 2
        queued_s = first_s = streamed_s = taken_in = lives = 0.0
        prompt_alone_s, crowded_by, crowding = self._prompt_alone_s(), -1.0, 1.0
        for span_s, rate in spans:
            running = early + late
            slots, times = self.slots(now_s), self.times(running if running > 1.0 else 1.0)
            woven = now_s < interference.woven_s
            base_s, single_s, full_s = map(interference.cycle_s, times) if woven else times
            wanted, free = queue / span_s + rate, slots - running if slots > running else 0.0
            prompt_s = chunks * (single_s - base_s) * (interference.synced if woven else 1.0)
            # steps are as long as prompts make them: all that want, as many as slots get free for, or full ones
            all_share, free_share = 1.0 - prompt_s * wanted, 1.0 - prompt_s * free / span_s
            step_s = base_s / all_share if all_share * full_s > base_s else full_s
            let_in_s = base_s + prompt_s * running / outputs
            step_s = let_in_s / free_share if free_share * step_s > let_in_s else step_s
            stage_s = outputs * step_s / 2
            stays = math.exp(-span_s / stage_s)
            taken = min(wanted * span_s, span_s * full_prompts / full_s, free + running * (1 - stays) / 2)
            left = queue + rate * span_s - taken
            queued_s += (queue + left) / 2 * span_s
            if rate != crowded_by:
                crowded_by, crowding = rate, _crowding(min(_MOST_USED, rate * prompt_alone_s), self.groups)
            first_s += taken * crowding * ((running if running < 1.0 else 1.0) * step_s / 2 + chunks * single_s)
            spread = (1 - stays) * stage_s / span_s
            halfway = early + taken - (early := early * stays + taken * spread)
            ended = late + halfway - (late := late * stays + halfway * spread)
            streamed_s += (halfway + ended) * stage_s
            taken_in, lives, queue, now_s = taken_in + taken, lives + (halfway + ended) / 2, left, now_s + span_s
        rest = self._rest(now_s, queue, early, late)
        means = first_s / taken_in, streamed_s / (lives * outputs)
        return FluidFigures(queued_s + rest[0], first_s + rest[1], streamed_s + rest[2], *means)

    def _rest(self, now_s: float, queue: float, early: float, late: float) -> tuple[float, float, float]:
        """Request-seconds as in `FluidFigures` of what is left, worked off."""
        slots = self.slots(now_s)
        base_s, single_s, full_s = self.times(max(1.0, min(slots, early + late + queue)))
        per_s = min(self.budget / (self.prompt * full_s), slots / (self.outputs * base_s))
        streaming_s = (early + late / 2 + queue) * self.outputs * base_s
        return queue**2 / (2 * per_s), queue * self.chunks * single_s, streaming_s

    def _prompt_alone_s(self) -> float:
        """By how much a prompt makes steps longer, in all."""
        base_s, _, full_s = self.times(1.0)
        return (full_s - base_s) / self.budget * self.prompt


def _crowding(used: float, groups: int) -> float:
    """By how much requests that come at random delay each other's prompts, where the least loaded group gets the next.

    The mean wait of a queue with several servers, as Sakasegawa approximates it ("An approximation formula
    L_q = alpha * rho^beta / (1 - rho)", 1977), for service times that are less random than exponential ones.

    Args:
        used: share of time that prompts take, below 1.
        groups: servers of the queue.
    """
    return 1 + _SPREAD * used ** (math.sqrt(2 * (groups + 1)) - 1) / (groups * (1 - used))
