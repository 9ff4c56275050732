"""The table: each patch and each stand-in fits the installed vLLM, and undoing the patches leaves
no trace.
"""

import inspect
from importlib import import_module
from typing import Any

import pytest

from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter.patches import installer, table
from flying_serving.vllm_adapter.patches.patch import HANDED, Patch, StandIn, find, resolve
from flying_serving.vllm_adapter.patches.seams import SEAMS
from flying_serving.vllm_adapter.patches.table import (
    ENTRY_PATCHES,
    PATCHES,
    SERVER_PATCHES,
    STAND_INS,
)

pytestmark = pytest.mark.usefixtures("unpatched")

GROUPS = {"engine": PATCHES, "entry": ENTRY_PATCHES, "server": SERVER_PATCHES}
ALL = (*PATCHES, *ENTRY_PATCHES, *SERVER_PATCHES, table.REFUSAL)


def stored(target: str) -> Any:
    """Return what a name holds, the descriptor itself of a class."""
    owner, name, _ = find(target)
    return owner.__dict__[name]


def parameters_of(one: Patch) -> tuple[str, ...]:
    """Return the names that the table says."""
    names = one.original.removeprefix(f"{one.target}(").removesuffix(")")
    return tuple(names.split(", ")) if names else ()


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.target.split(":")[1])
def test_a_hook_takes_the_original_and_what_the_original_takes(one: Patch) -> None:
    """By the same names, in the same order, with the same defaults; those that it does not read as
    *args, **kwargs.
    """
    module, name = one.hook.split(":")
    assert module == HANDED or module.startswith("flying_serving.vllm_adapter.")
    hook = HOOKS[name] if module == HANDED else getattr(import_module(module), name)
    first, *rest = inspect.signature(hook).parameters.values()
    assert first.name == "original"
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert one.why
    named = [p for p in rest if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(named) < len(parameters_of(one)):
        variadic = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
        assert [p.kind for p in rest[len(named) :]] == variadic
    else:
        assert named == rest
    assert tuple(p.name for p in named) == parameters_of(one)[: len(named)]
    theirs = inspect.signature(resolve(one.original).value).parameters
    assert {p.name: p.default for p in named} == {p.name: theirs[p.name].default for p in named}


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda one: one.target.split(":")[1])
def test_a_stand_in_fits_the_installed_vllm(stand_in: StandIn) -> None:
    module, name = stand_in.setter.split(":")
    assert callable(getattr(import_module(module), name))
    assert stand_in.why
    owner, name, _ = resolve(stand_in.original)
    assert inspect.ismodule(owner)
    assert name in vars(owner)


def test_every_name_is_patched_once() -> None:
    """And none both patched and relied on."""
    targets = [one.target for one in (*ALL, *STAND_INS)]
    assert len(set(targets)) == len(targets)
    assert not set(targets) & {seam.partition("(")[0] for seam in SEAMS}


@pytest.mark.parametrize("group", GROUPS)
def test_install_and_uninstall_vllm(group: str) -> None:
    """Every name holds something else in between, of the same kind and signature, and the very
    original afterwards.
    """
    patches = GROUPS[group]
    before = {one.target: stored(one.target) for one in ALL}
    signatures = {one.target: inspect.signature(_plain(before[one.target])) for one in patches}
    installer.install(patches, HOOKS)
    for one in ALL:
        now = stored(one.target)
        if one in patches:
            assert now is not before[one.target]
            assert type(now) is type(before[one.target]) or not isinstance(
                now, staticmethod | property
            )
            assert inspect.signature(_plain(now)) == signatures[one.target]
            assert _plain(now).__wrapped__ is _plain(before[one.target])
        else:
            assert now is before[one.target]
    installer.uninstall()
    for one in ALL:
        assert stored(one.target) is before[one.target]
    assert installer._originals == {}


def _plain(found: Any) -> Any:
    """Return the function in a descriptor."""
    if isinstance(found, property):
        return found.fget
    return found.__func__ if isinstance(found, staticmethod) else found
