"""Members of a group, and devices of an engine, that sample other tokens until they begin anew."""

import os
from typing import Any


def members_apart() -> None:
    """Each member of a group draws random numbers of its own."""
    from flying_serving.vllm_adapter.model_runner import device_lane

    seed_of = device_lane.seed_of

    def other_on_one_member(seed: Any, group: Any, numbers: Any) -> int:
        # after the first error the members begin anew, with one number more
        is_first = len(numbers) == len(group)
        return int(seed_of(seed, group, numbers) + (os.getpid() if is_first else 0)) % 2**32

    device_lane.seed_of = other_on_one_member


def devices_apart() -> None:
    """The second device of each engine draws random numbers of its own."""
    from flying_serving.worker.lanes import DeviceLanes

    seed = DeviceLanes.seed

    def other_on_second_devices(self: Any) -> None:
        seed(self)
        if self.device == 1:
            self[2]._randomness.seed(7)

    DeviceLanes.seed = other_on_second_devices  # type: ignore[method-assign]
