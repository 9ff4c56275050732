"""A worker on the CPU that keeps weights and KV as on CUDA: in arenas of a device, whose driver has
memory of the host. Servers of tests name it by `--worker-cls`.
"""

from typing import Any

from flying_serving.worker.worker import FlyingCPUWorker
from tests.unit.memory.fake_cuda import PAGE, FakeDriver, fake_device


class ArenaWorker(FlyingCPUWorker):
    """Weights are whole, and lie in pages that they lend to KV; peers map KV by descriptors."""

    pack_weights = False

    def init_device(self) -> None:
        """Take the device whose memory is the host's."""
        super().init_device()
        self.cuda = fake_device(FakeDriver(pages=1 << 20))

    def compile_or_warm_up_model(self) -> Any:
        """Let the driver have no page more than are used now: all others come from weights."""
        times = super().compile_or_warm_up_model()
        assert self.cuda is not None
        driver: Any = self.cuda._driver
        driver.pages = driver.used_bytes // PAGE
        return times
