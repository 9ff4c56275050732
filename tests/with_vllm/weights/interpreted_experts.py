"""Prints how far lanes with slices of experts are from ranks of stock vLLM, of one case.

A test calls `main` in a process of its own, with the variables of `harness.triton_cpu`: vLLM's
kernel runs in Triton's interpreter.
"""

import tempfile
from pathlib import Path

from vllm.model_executor.models import registry

from harness.experts_cpu.kernel import register_operations
from tests.with_vllm.weights.expert_cases import CASES, with_kernel
from tests.with_vllm.weights.expert_ranks import largest_difference

MANY = 32
"""Experts, of which few are chosen. vLLM then sorts no tokens, for which it has no operation on a
CPU.
"""


def main(name: str) -> None:
    """Compare a case."""
    # an interpreter for each class of a model would take 7 s
    registry._run_in_subprocess = lambda work: work()
    register_operations()
    model = CASES[name]
    experts = {key: MANY for key in model if key in ("num_local_experts", "num_experts")}
    with tempfile.TemporaryDirectory() as folder, with_kernel(Path(folder), model | experts) as it:
        print(largest_difference(it))  # noqa: T201
