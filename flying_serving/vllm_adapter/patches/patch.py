"""A name of vLLM that is replaced: what it must still look like, and how it is found."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from flying_serving.errors import HookError
from flying_serving.vllm_adapter.patches.version import VLLM_VERSION

HANDED = "handed"
"""In place of a module: hooks of vLLM's server are above this package, which imports none of it."""


@dataclass(frozen=True)
class Patch:
    """A function, method or property that is wrapped.

    Args:
        original: "module:qualified.name(parameters)": its parameters must have these names, in
            this order.
        hook: "module:name" of the wrapper in this package, or "handed:name" of one that `install`
            is given. It gets the original, then what the original gets.
        why: what it is for.
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
        why: what it is for.
    """

    original: str
    setter: str
    why: str

    @property
    def target(self) -> str:
        """The name of the original: "module:name"."""
        return target_of(self.original)


class Found(NamedTuple):
    """Where a name is, and what it holds: the function of a property."""

    owner: Any
    name: str
    value: Any


def target_of(original: str) -> str:
    """An original without its parameters."""
    return original.partition("(")[0]


def find(target: str) -> Found:
    """Raise HookError if there is no such name in this vLLM."""
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
    """Raise HookError unless the name is there, with the parameters of `original` if it has any."""
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
