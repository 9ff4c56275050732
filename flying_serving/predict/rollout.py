"""One of several equal groups as a fluid model: its requests queue, stream and end within coarse
spans of time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flying_serving.predict.step_times import LaneSteps
from flying_serving.predict.work import Interference, LaneFigures, Objective, Work

MAX_UTILIZATION = 0.85
"""Share of time: a queue whose load is higher has no time to grow to its mean length within the
horizon.
"""
LENGTHS_CV = 0.55
"""Coefficient of variation of prompt lengths: of a uniform distribution from almost 0 it is 1 /
sqrt(3) = 0.58.
"""
_SPREAD = math.sqrt(math.log(1 + LENGTHS_CV**2)) * math.sqrt(3) / math.pi
"""Scale of the logistic distribution of a time's logarithm, if the time varies as prompt lengths
do.
"""


# not frozen: made for every layout that is evaluated, and that takes three times as long
@dataclass(slots=True)
class GroupState:
    """The requests of the group at a time, and sums since the start.

    Args:
        now_s: the time, in seconds from the decision.
        queue: requests that wait for their prompt.
        first_half: requests that stream the first half of their output.
        second_half: requests that stream the second half.
        queued_s: request-seconds in the queue.
        first_s: request-seconds from the queue to the first token.
        streamed_s: request-seconds from the first token to the last.
        admitted: requests taken from the queue.
        lives: outputs streamed, in whole outputs.
        missed: requests that miss the service-level objective.
        blocked: requests of the queue that waited while the group was blocked.
    """

    now_s: float
    queue: float
    first_half: float
    second_half: float
    queued_s: float = 0.0
    first_s: float = 0.0
    streamed_s: float = 0.0
    admitted: float = 0.0
    lives: float = 0.0
    missed: float = 0.0
    blocked: float = 0.0


@dataclass(slots=True)
class FluidModel:
    """The constants of a rollout: the group's lane, and the shape of its requests.

    Args:
        lane: the abilities of the group.
        objective: the targets of requests.
        interference: the requests of an older layout, which are in the way at first.
        groups: the number of groups that share the work evenly.
        prompt_tokens: of a request, mean.
        output_tokens: of a request, mean, at least 1.
        chunks: steps that a prompt takes, mean.
        max_running: requests that the group can run.
        max_running_woven: the same while an older group holds memory.
        steps: the times of the group's steps.
    """

    lane: LaneFigures
    objective: Objective
    interference: Interference
    groups: int
    prompt_tokens: float
    output_tokens: float
    chunks: float
    max_running: float
    max_running_woven: float
    steps: LaneSteps

    @classmethod
    def of(
        cls,
        lane: LaneFigures,
        groups: int,
        work: Work,
        objective: Objective,
        interference: Interference,
    ) -> FluidModel:
        """Return the model of one of `groups` groups that share the work evenly."""
        prompt, outputs = work.prompt_tokens, max(1.0, work.output_tokens)
        tokens, held = prompt + outputs, interference.held_tokens / groups
        most = max(1.0, min(lane.max_num_seqs, lane.kv_tokens / tokens))
        woven = max(1.0, min(lane.max_num_seqs, (lane.kv_tokens - held) / tokens)) if held else most
        chunks = max(1.0, prompt / lane.max_num_batched_tokens)
        steps = LaneSteps.of(lane, prompt, outputs)
        return cls(
            lane, objective, interference, groups, prompt, outputs, chunks, most, woven, steps
        )

    def limit(self, now_s: float) -> float:
        """Return how many requests the group can run at a time."""
        return self.max_running if now_s >= self.interference.woven_s else self.max_running_woven

    def step(self, state: GroupState, span_s: float, rate: float, crowding: float) -> None:
        """Advance `state` by a span of T = `span_s` seconds in which requests arrive at `rate`.

        Of the running requests, r = early + late (`first_half`, `second_half`). s is the seconds of
        a step and F the most prompts in the span (`pace`). With n = `output_tokens`, c = n s / 2
        is the seconds of half an output.

            remaining    e = exp(-T / c)                        of requests in a stage at its start
            admitted     a = min(queue + rate T, F, free + r (1 - e) / 2)
            queue'         = queue + rate T - a
            queued_s      += T (queue + queue') / 2
            newcomers    m = (1 - e) c / T                      their share in the stage at the end
            early'         = e early + a m
            halfway      h = early + a - early'                 requests that pass the middle
            late'          = e late + h m
            ended          = late + h - late'
            streamed_s    += c (h + ended)
            first_s       += a (min(1, r) s / 2 + p's steps) crowding
                                                                the step under way, then their own

        Two stages, so that requests that have just begun do not end at once.
        """
        queue, running = state.queue, state.first_half + state.second_half
        limit, demand = self.limit(state.now_s), queue / span_s + rate
        free = limit - running if limit > running else 0.0
        step_s, chunk_s, most = self.pace(state, span_s, demand, free)
        stage_s = self.output_tokens * step_s / 2
        remaining = math.exp(-span_s / stage_s)
        admitted = min(demand * span_s, most, free + running * (1 - remaining) / 2)
        state.queue = queue + rate * span_s - admitted
        queued_s = (queue + state.queue) / 2 * span_s
        first_s = crowding * (
            (running if running < 1.0 else 1.0) * step_s / 2 + self.chunks * chunk_s
        )
        newcomers = (1 - remaining) * stage_s / span_s
        halfway = state.first_half + admitted
        state.first_half = state.first_half * remaining + admitted * newcomers
        halfway -= state.first_half
        ended = state.second_half + halfway
        state.second_half = state.second_half * remaining + halfway * newcomers
        ended -= state.second_half
        lives = (halfway + ended) / 2
        if self.objective.has_slo:
            held = min(state.blocked, admitted)
            state.blocked -= held
            waited_s = queued_s + held * self.interference.blocked_s
            ttft_s = first_s + waited_s / admitted if admitted > 0.0 else math.inf
            state.missed += self.missed(admitted, lives, ttft_s, step_s)
        state.queued_s += queued_s
        state.first_s += admitted * first_s
        state.streamed_s += 2 * lives * stage_s
        state.admitted += admitted
        state.lives += lives
        state.now_s += span_s

    def pace(
        self, state: GroupState, span_s: float, demand: float, free: float
    ) -> tuple[float, float, float]:
        """Return the seconds of a step, the seconds of a step with a chunk of one prompt, and the
        most prompts in the span.

        The seconds of a decoding and of a full step are d and f (`StepTimes`; in a weave with the
        older group's time slice). A prompt adds p seconds to steps, and w = `demand` prompts arrive
        per second.

            step      s = d / (1 - p w)      no prompts, and the share p w of time for them
            at most   f
            at most   (d + p r / n) / (1 - p free / T)          places that get free
        """
        interference, running = self.interference, state.first_half + state.second_half
        times, woven = (
            self.steps.times(running if running > 1.0 else 1.0),
            state.now_s < interference.woven_s,
        )
        decode_s, chunk_s, full_s = map(interference.cycle_s, times) if woven else times
        prompt_s = self.chunks * (chunk_s - decode_s) * (interference.synced if woven else 1.0)
        all_share, free_share = 1.0 - prompt_s * demand, 1.0 - prompt_s * free / span_s
        step_s = decode_s / all_share if all_share * full_s > decode_s else full_s
        freed_s = decode_s + prompt_s * running / self.output_tokens
        step_s = freed_s / free_share if free_share * step_s > freed_s else step_s
        return (
            step_s,
            chunk_s,
            span_s / full_s * self.lane.max_num_batched_tokens / self.prompt_tokens,
        )

    def finish(self, state: GroupState) -> None:
        """Add the rest at the end of the spans to the sums, worked off while nothing arrives."""
        limit, left = self.limit(state.now_s), state.first_half + state.second_half + state.queue
        decode_s, chunk_s, full_s = self.steps.times(max(1.0, min(limit, left)))
        per_s = min(
            self.lane.max_num_batched_tokens / (self.prompt_tokens * full_s),
            limit / (self.output_tokens * decode_s),
        )
        lives = state.first_half + state.second_half / 2 + state.queue
        if self.objective.has_slo:
            wait_s = state.queue / (2 * per_s)
            state.missed += self.missed(
                state.queue, lives, wait_s + self.chunks * chunk_s, decode_s
            )
        state.queued_s += state.queue**2 / (2 * per_s)
        state.first_s += state.queue * self.chunks * chunk_s
        state.streamed_s += lives * self.output_tokens * decode_s

    def missed(self, admitted: float, lives: float, ttft_s: float, tpot_s: float) -> float:
        """Return how many requests with a first token, or that stream, miss the service-level
        objective.

        A request counts once: by its TTFT when it gets its first token, and if that met the target,
        by its TPOT.
        """
        exceeded = miss(ttft_s, self.objective.ttft_s)
        return admitted * exceeded + lives * (1 - exceeded) * miss(tpot_s, self.objective.tpot_s)

    def crowding(self, rate: float) -> float:
        """Return the factor by which prompts that arrive at random delay each other, in the group
        that has least to do.

        It is the mean wait of a queue with several servers, for service times with the coefficient
        of variation LENGTHS_CV. The approximation is Sakasegawa's ("An approximation formula L_q =
        alpha * rho^beta / (1 - rho)", 1977).
        """
        decode_s, _, full_s = self.steps.times(1.0)
        used = rate * (full_s - decode_s) / self.lane.max_num_batched_tokens * self.prompt_tokens
        used = used if used < MAX_UTILIZATION else MAX_UTILIZATION
        groups, variation = self.groups, (1 + LENGTHS_CV**2) / 2
        return 1 + variation * used ** (math.sqrt(2 * (groups + 1)) - 1) / (groups * (1 - used))


def miss(predicted_s: float, target_s: float) -> float:
    """Return the probability that a time exceeds its target, if its median is predicted: a
    log-logistic distribution.
    """
    if target_s == math.inf:
        return 0.0
    if predicted_s == math.inf:
        return 1.0
    return 1 / (1 + (target_s / predicted_s) ** (1 / _SPREAD))
