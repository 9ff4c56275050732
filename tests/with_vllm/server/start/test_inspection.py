"""A model whose module of vLLM imports a package that is not there."""

import importlib
import sys

import pytest

from flying_serving.server.start.inspection import missing_import

SAID = (
    "--model: Model architectures ['{}'] failed to be inspected. Please check the logs for more "
    "details."
)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in `sys.modules` stands for a package that cannot be found."""
    monkeypatch.delitem(sys.modules, "vllm.model_executor.models.qwen3_5", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.qwen3_vl", None)
    architecture = "Qwen3_5ForConditionalGeneration"
    problem = missing_import(SAID.format(architecture))
    assert problem is not None
    assert problem.startswith(f"--model: vLLM's module of {architecture} cannot be imported: ")
    assert "qwen3_vl" in problem


def test_a_package_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist\nsee the log")

    monkeypatch.setattr(importlib, "import_module", load)
    problem = missing_import(SAID.format("LlamaForCausalLM"))
    assert problem is not None
    assert problem.endswith("cannot be imported: operator torchvision::nms does not exist")


@pytest.mark.parametrize(
    "problem",
    [
        SAID.format("LlamaForCausalLM"),
        SAID.format("NoSuchModel"),
        "--max-model-len=11: Input should be less than or equal to 10",
    ],
)
def test_another_problem_is_none(problem: str) -> None:
    assert missing_import(problem) is None
