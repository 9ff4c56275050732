"""Steps that last as a test says: what `auto` does by load is then the same on a machine of any
speed, also a busy one.

A step ends no sooner than its pace, and sleeps until then: as long as the real step, of a tiny
model, is shorter, what the server measures at its start and while it serves is the pace. All other
code is what production runs.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pace:
    """The least that a step lasts: `fixed_s`, and `token_s` for each of its tokens, of prompts or
    decoding.
    """

    fixed_s: float
    token_s: float = 0.0

    def step_s(self, tokens: int) -> float:
        """Seconds of a step."""
        return self.fixed_s + self.token_s * tokens if tokens else 0.0


def pace(**lanes: Pace) -> str:
    """The preamble of a server whose lanes step at these paces: `single` engines, and a `pair` of
    them.
    """
    return f"from harness.paced import Pace, slow_down; slow_down({lanes!r})"


def slow_down(lanes: dict[str, Pace]) -> None:
    """Let each step of the servers that this process starts last at least as its lane's pace
    says.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute = GPUModelRunner.execute_model
    paces = {1: lanes["single"], 2: lanes["pair"]}

    @functools.wraps(execute)  # its signature is compared with the one that is needed
    def paced(self: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        step_s = paces[self.parallel_config.tensor_parallel_size].step_s(
            plan.total_num_scheduled_tokens
        )
        until_s = time.monotonic() + step_s
        output = execute(self, plan, *args, **kwargs)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return output

    GPUModelRunner.execute_model = paced
