"""The checks of the lanes of a device at every start: compiled steps with eager ones, and each lane
with lane 1.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from flying_serving.errors import ConfigError, GroupBroken, LaneError
from flying_serving.parallelism import Parallelism
from flying_serving.vllm_adapter.model_runner.compiled import is_compiled
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.made_up_steps import (
    CHECK_REQUESTS,
    CHECK_TOKENS,
    check_steps,
)
from flying_serving.vllm_adapter.model_runner.rank_widths import (
    activations_by_width,
    widths_of_ranks,
)
from flying_serving.vllm_adapter.request_kinds import made_up_variant
from flying_serving.worker.compiled import check_compiled
from flying_serving.worker.selfcheck import (
    Difference,
    LayerOutputs,
    compare,
    record,
    require_alike,
    tolerance,
)
from flying_serving.worker.token_check import compare_shares


def most_requests(lane1: DeviceLane, blocks: int) -> int:
    """Return how many made-up requests of a check fit in a step, each in blocks of its own.

    `blocks`: KV blocks of lane 1.

    Raises:
        ConfigError: if there are too few blocks for one request.
    """
    scheduler, groups = lane1.config.scheduler_config, lane1.kv.groups
    needed = len(groups.groups)
    if blocks - 1 < needed:
        raise ConfigError(
            f"--kv-cache-memory-bytes: memory for {blocks} KV blocks, and this model needs at "
            f"least {needed + 1}"
        )
    in_a_step = scheduler.max_num_batched_tokens // CHECK_TOKENS
    return int(min(scheduler.max_num_seqs, groups.most_requests(blocks - 1), in_a_step))


def _by_reason(lanes: Iterable[DeviceLane]) -> dict[str | None, list[int]]:
    """Return the sizes of lanes by why they have no token parallel steps; None: they have some."""
    found: defaultdict[str | None, list[int]] = defaultdict(list)
    for lane in lanes:
        why = lane.divides_tokens
        found[why if isinstance(why, str) else None].append(lane.size)
    return dict(found)


def _refusal(found: Collection[Difference], allowed: float) -> str | None:
    """Return why the token parallel steps of a lane must not serve, by what was compared; None if
    they may.
    """
    wrong = [difference for difference in found if not difference.share <= allowed]
    if found and not wrong:
        return None
    largest = max(wrong, key=attrgetter("share"), default=None)
    what = "nothing could be compared"
    if largest is not None:
        what = f"{largest.stage} differs by {largest.share:.2g}"
    return f"they do not compute what lane 1 does: {what}"


class LaneChecks:
    """The checks of one device. `lanes`: all of it, lane 1 first. `say`: logs a phase.
    `input_rounding`: the part that quantized layers may differ by, beside that of the type.
    `eager_where_refused`: as `Deployment.eager_where_refused`.

    `blocks`, in the methods: the KV blocks that have memory.
    """

    def __init__(
        self,
        lanes: Iterable[DeviceLane],
        say: Callable[[str], None],
        input_rounding: float,
        *,
        eager_where_refused: bool = False,
    ) -> None:
        self._lane1, *self._others = lanes
        self._say = say
        self._input_rounding = input_rounding
        self._eager_where_refused = eager_where_refused

    @torch.inference_mode()
    def compare_compiled(self, blocks: int) -> None:
        """Compare lane 1 with its own code, if it is compiled: see `worker/compiled.py`.

        Raises:
            LaneError: if it differs, unless it is to be eager then.
        """
        if not is_compiled(self._lane1.config):
            return
        requests = most_requests(self._lane1, blocks)
        try:
            with self._lane1.graphs.unused():
                largest = check_compiled(self._lane1, requests)
        except LaneError as error:
            if not self._eager_where_refused:
                raise LaneError(
                    f"--enforce-eager=False: {error}. Start with --enforce-eager"
                ) from None
            self._lane1.stay_uncompiled()
            self._say(f"lane 1: steps run the model's own code: {error}")
            return
        self._say(f"lane 1: compiled steps equal eager steps within {largest:.1e}")

    @torch.inference_mode()
    def compare_lanes(self, blocks: int) -> None:
        """Compare each lane with lane 1: see `worker/selfcheck.py`.

        Raises:
            LaneError: if one differs.
            ConfigError: if a step is too short for it.
        """
        if not self._others:
            return
        began_s = time.monotonic()
        self._say("comparing each lane with lane 1")
        lane1 = self._lane1
        scheduler, model = lane1.config.scheduler_config, lane1.config.model_config
        if scheduler.max_num_batched_tokens < CHECK_TOKENS:
            raise ConfigError(
                f"--max-num-batched-tokens={scheduler.max_num_batched_tokens}: must be at least "
                f"{CHECK_TOKENS}"
            )
        requests = min(CHECK_REQUESTS, most_requests(lane1, blocks))
        differ = bool(activations_by_width(lane1.model))
        expected: LayerOutputs | None = None
        largest, allowed = 0.0, tolerance(model.dtype) + self._input_rounding
        with made_up_variant(lane1.vllm_runner) as variant:
            steps = partial(check_steps, requests, model.get_vocab_size(), variant=variant)
            for lane in self._others:
                if expected is None or differ:
                    expected = self._outputs_of_lane1(lane.size, steps(lane1.kv.groups))
                found = compare(lane.model, lane.step, steps(lane.kv.groups), expected)
                largest = max(largest, require_alike(lane.size, found, allowed, lane.any_of))
                if not isinstance(lane.divides_tokens, str):
                    again = steps(lane.kv.groups)
                    self._compare_token_parallel(lane, again, expected, allowed)
        self._say_which_divide_tokens()
        took_s = time.monotonic() - began_s
        self._say(f"lanes equal lane 1 within {largest:.1e}; comparing took {took_s:.2f} s")

    def _compare_token_parallel(
        self, lane: DeviceLane, steps: Iterable[Any], expected: LayerOutputs, allowed: float
    ) -> None:
        """Compare the token parallel steps of a lane with lane 1. If they fail, or differ on any
        engine that measures its steps together with this one, the lane has none.
        """
        coordinator = lane.communicators.same_device(lane.size)
        try:
            found = compare_shares(
                self._lane1.model,
                lane.model,
                partial(lane.step, parallelism=Parallelism.TOKEN),
                steps,
                expected,
                (coordinator.rank_in_group, coordinator.world_size),
            )
            why = _refusal(found, allowed)
        except GroupBroken:
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything of some tokens
            why = f"they fail: {type(error).__name__}: {error}"
            lane.drop_requests()  # of the step that failed
        # all that measure steps together have the same ways to measure
        widest = max(self._others, key=attrgetter("size"))
        if widest.any_of(why is not None):
            lane.divides_tokens = why or "another engine refuses them"

    def _say_which_divide_tokens(self) -> None:
        """Log which lanes have token parallel steps, and why others have none."""
        for why, sizes in _by_reason(self._others).items():
            have = "may divide tokens" if why is None else f"divide weights alone: {why}"
            self._say(f"steps of groups of {sizes} engines {have}")

    def _outputs_of_lane1(self, size: int, steps: Iterable[Any]) -> LayerOutputs:
        """Record lane 1's eager steps, with activations as wide as those of a rank of `size`
        engines.
        """
        lane1 = self._lane1
        with (
            lane1.graphs.unused(),
            lane1.uncompiled(),
            widths_of_ranks(lane1.model, size),
        ):
            return record(lane1.model, lane1.step, steps)
