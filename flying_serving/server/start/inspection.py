"""Why vLLM cannot look into a model's class."""

import importlib
import re

_NOT_INSPECTED = re.compile(r"Model architectures \['(\w+)'.*failed to be inspected")


def missing_import(problem: str) -> str | None:
    """Return one line on an import that fails. Return None if `problem` is of no model whose module
    vLLM cannot import.

    vLLM says only that its log has more. Imports the module.
    """
    found = _NOT_INSPECTED.search(problem)
    if found is None:
        return None
    from vllm.model_executor.models.registry import ModelRegistry

    architecture = found[1]
    module = getattr(ModelRegistry.models.get(architecture), "module_name", None)
    if module is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a package built for another torch raises any
        reason = str(error).split("\n")[0]
        return f"--model: vLLM's module of {architecture} cannot be imported: {reason}"
    return None
