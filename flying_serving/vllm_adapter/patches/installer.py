"""Replaces the names of `table.py` in this process, and puts the originals back."""

import functools
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flying_serving.vllm_adapter.patches.patch import HANDED, Patch, StandIn, find, resolve
from flying_serving.vllm_adapter.patches.seams import SEAMS
from flying_serving.vllm_adapter.patches.table import PATCHES, STAND_INS
from flying_serving.vllm_adapter.patches.version import check_version

Hook = Callable[..., Any]
"""A wrapper: its first argument is the original, the others are the original's."""
NO_HOOKS: Mapping[str, Hook] = MappingProxyType({})
_originals: dict[str, Any] = {}
"""The values that names held before, by target."""


def install(patches: tuple[Patch, ...] = PATCHES, handed: Mapping[str, Hook] = NO_HOOKS) -> None:
    """Apply patches to this process; patches that are applied already stay as they are.

    With the patches of an engine the seams and stand-ins are checked too.

    Args:
        patches: a tuple of `table.py`.
        handed: hooks by name, for patches that have none in this package.

    Raises:
        HookError: if the installed vLLM is another one, or looks different.
    """
    if all(patch.target in _originals for patch in patches):
        return
    check_version()
    if patches is PATCHES:
        for original in (*SEAMS, *(stand_in.original for stand_in in STAND_INS)):
            resolve(original)
    apply(patches, handed)


def apply(patches: tuple[Patch, ...], handed: Mapping[str, Hook] = NO_HOOKS) -> None:
    """Apply patches under any version. Raises HookError as `install`."""
    for patch in patches:
        if patch.target not in _originals:
            owner, name, function = resolve(patch.original)
            descriptor = owner.__dict__[name]
            wrapped = _wrap(_hook_of(patch, handed), function)
            _replace(patch.target, descriptor, _in_kind_of(descriptor, wrapped))


def hold(stand_in: StandIn, value: Any) -> None:
    """Let a name hold a value until `uninstall`; a context manager may replace it for a while."""
    _replace(stand_in.target, find(stand_in.target).value, value)


def uninstall() -> None:
    """Restore the original of each replaced name."""
    for target, original in _originals.items():
        owner, name, _ = find(target)
        setattr(owner, name, original)
    _originals.clear()


def _replace(target: str, original: Any, value: Any) -> None:
    _originals.setdefault(target, original)
    owner, name, _ = find(target)
    setattr(owner, name, value)


def _hook_of(patch: Patch, handed: Mapping[str, Hook]) -> Hook:
    module, name = patch.hook.split(":")
    if module == HANDED:
        return handed[name]
    hook: Hook = getattr(importlib.import_module(module), name)
    return hook


def _in_kind_of(descriptor: Any, function: Callable[..., Any]) -> Any:
    """Return a function as the kind of its descriptor: a static method stays one, a property
    too.
    """
    is_wrapper = isinstance(descriptor, staticmethod | property)
    return type(descriptor)(function) if is_wrapper else function


def _wrap(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return patched
