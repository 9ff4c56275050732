"""The stand-in for torchvision can be imported, and not used."""

import importlib
import sys
from types import ModuleType

import pytest
import transformers.utils

from harness.no_torchvision.stand_in import NAMES, register


def test_modules_can_be_imported_and_nothing_of_them_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils, "is_torchvision_available", lambda: False)
    found: dict[str, ModuleType] = {}
    register(found)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    functional = importlib.import_module(NAMES[-1])
    assert functional is found[NAMES[-1]]
    with pytest.raises(AttributeError, match=r"torchvision is not installed, so .*\.resize"):
        functional.resize  # noqa: B018 - to see it raise


def test_torchvision_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils, "is_torchvision_available", lambda: True)
    found: dict[str, ModuleType] = {}
    register(found)
    assert not found
