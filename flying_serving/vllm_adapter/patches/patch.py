"""A replaced name of vLLM: the signature that it must have, and the search for it."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from flying_serving.errors import HookError
from flying_serving.vllm_adapter.patches.version import VLLM_VERSION

HANDED = "handed"
"""In place of a module. Hooks of vLLM's server are above this package, which imports none of
them.
"""


@dataclass(frozen=True)
class Patch:
    """A function, method or property that is wrapped.

    Args:
        original: "module:qualified.name(parameters)": its parameters must have these names, in
            this order.
        hook: "module:name" of the wrapper in this package, or "handed:name" of one that `install`
            is given. Its first argument is the original, the others are the original's.
        why: the reason for the patch.
    """

    original: str
    hook: str
    why: str

    @property
    def target(self) -> str:
        """The name of the original: "module:qualified.name"."""
        return target_of(self.original)


@dataclass(frozen=True)
class StandIn:
    """A name of a module that holds another value while a context manager is entered.

    Args:
        original: "module:name(parameters)" of a class, or "module:name" of a variable.
        setter: "module:name" of the functions that replace it.
        why: the reason for the replacement.
    """

    original: str
    setter: str
    why: str

    @property
    def target(self) -> str:
        """The name of the original: "module:name"."""
        return target_of(self.original)


class Found(NamedTuple):
    """The place of a name, and its value: of a property, the function."""

    owner: Any
    name: str
    value: Any


def target_of(original: str) -> str:
    """Return an original without its parameters."""
    return original.partition("(")[0]


def find(target: str) -> Found:
    """Find a name. Raises HookError if this vLLM has no such name."""
    module_name, path = target.split(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    try:
        for parent in parents:
            owner = getattr(owner, parent)
        return Found(owner, name, getattr(owner, name))
    except AttributeError:
        raise HookError(f"{target} is not in this vLLM; {VLLM_VERSION} is needed") from None


def resolve(original: str) -> Found:
    """Find a name. Raises HookError unless it is there, with the parameters of `original` if it has
    any.
    """
    target, has_parameters, names = original.removesuffix(")").partition("(")
    owner, name, value = find(target)
    if isinstance(value, property):
        value = value.fget
    if has_parameters:
        expected = tuple(filter(None, names.split(", ")))
        parameters = tuple(inspect.signature(value).parameters)
        if parameters != expected:
            differs = f"{target}{parameters} is not {expected}"
            raise HookError(f"{differs}; vLLM {VLLM_VERSION} is needed")
    return Found(owner, name, value)
