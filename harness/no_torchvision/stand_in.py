"""The modules of torchvision that are imported without asking whether it is there."""

import sys
from collections.abc import MutableMapping
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class StandIn(ModuleType):
    """A module of which nothing can be used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        """Raise AttributeError."""
        raise AttributeError(
            f"torchvision is not installed, so {self.__name__}.{name} is not there"
        )


def register(modules: MutableMapping[str, ModuleType] = sys.modules) -> None:
    """Let torchvision be imported, unless it is installed. Where transformers asks, it goes on
    without it.
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or NAMES[0] in modules:  # transformers keeps its answer
        return
    for name in NAMES:
        modules[name] = StandIn(name)
        before, _, last = name.rpartition(".")
        if before:
            setattr(modules[before], last, modules[name])
