"""Errors of vLLM's configuration in one line, with the cause where vLLM does not name it."""

import importlib
import re
from typing import Any

from flying_serving.errors import ConfigError, Unsupported
from flying_serving.vllm_adapter.recurrent.models import refusal_of_itself

_NOT_INSPECTED = re.compile(r"Model architectures \['(\w+)'.*failed to be inspected")


def refusal_of(problem: str, args: Any) -> ConfigError:
    """Return the error for a problem of vLLM with its configuration, of these flags."""
    own = refusal_of_itself(problem, args)
    return Unsupported(own) if own else ConfigError(missing_import(problem) or problem)


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
