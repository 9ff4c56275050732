"""Workers on emulated devices: stock vLLM's, and ours with lanes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from flying_lab.emulation.profile import EmulatedLane, profile_of
from flying_lab.emulation.runner import EmulatedRunner
from flying_serving.memory.kv_view import KVView
from flying_serving.worker.worker import FlyingCPUWorker


class EmulatedWorker(CPUWorker):
    """vLLM's CPU worker with an emulated runner. One process stands for all devices of an
    engine.
    """

    def init_device(self) -> None:
        """Start as vLLM's CPU worker does, then take the emulated runner."""
        super().init_device()
        self.model_runner = EmulatedRunner(self.vllm_config, self.device)


class EmulatedLaneWorker(FlyingCPUWorker, EmulatedWorker):
    """Our CPU worker with an emulated runner in each lane."""

    def check_lanes(self) -> None:
        """Compare nothing: the lanes compute nothing."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Bind KV memory as our worker does. From now on a pull lasts as long as on the devices."""
        super().initialize_from_config(kv_cache_config)
        profile = profile_of(self.vllm_config.additional_config)
        views = self.lanes.kv_views
        for size, (view,) in views.items():
            timed = TimedKVView(
                view.parts,
                view.heads,
                view.block_tokens,
                view.kv_heads,
                view.states,
                view.cuts,
                lane=profile.lane(size),
            )
            views[size] = [timed]


@dataclass(frozen=True)
class TimedKVView(KVView):
    """A lane's KV, into which a copy lasts as long as a profile says."""

    lane: EmulatedLane = field(kw_only=True)

    def copy(
        self,
        source: KVView,
        heads: range,
        blocks: tuple[Sequence[int], Sequence[int]],
        tokens: range,
    ) -> None:
        """Copy KV, and wait until the emulated devices would have copied the share of these
        heads.
        """
        began_s = time.monotonic()
        super().copy(source, heads, blocks, tokens)
        took_s = self.lane.pull_s(len(tokens)) * len(heads) / len(self.heads)
        time.sleep(max(0.0, began_s + took_s - time.monotonic()))
