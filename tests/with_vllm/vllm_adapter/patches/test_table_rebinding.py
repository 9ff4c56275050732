"""No method of a vLLM object is rebound outside of the table of patches, and no name of its modules
is replaced.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flying_serving.vllm_adapter.patches.table import STAND_INS
from tests.with_vllm.vllm_adapter.patches.rebinding import (
    imported_from_vllm,
    methods,
    named_at_run_time,
    rebound_methods,
    replaced_names,
)

ROOT = Path(__file__).parents[4]
PACKAGE = ROOT / "flying_serving"
PATCHES = PACKAGE / "vllm_adapter" / "patches"

# file -> what it sets by a name that only the run knows, and on which objects
RUN_TIME_NAMES = {
    "flying_serving/vllm_adapter/patches/installer.py": "the names of the table",
    "flying_serving/vllm_adapter/distributed/coordinator.py": "methods of our own LaneCoordinator",
    "flying_serving/vllm_adapter/weights/loading.py": "attributes of our own parameters",
    "flying_serving/weights/adapters.py": "stacked tensors of a wrapper",
    "flying_serving/weights/formats.py": "the kernel of a copy of a method",
    "flying_serving/weights/gated.py": "the activation of a layer",
    "flying_serving/weights/linear.py": "tensors of a layer",
    "flying_serving/weights/plain.py": "tensors and the packed product of a layer",
    "flying_serving/weights/quantized.py": "scales of a layer",
}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the modules of all packages that import vLLM somewhere; the others never have an
    object of it.
    """
    found = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    with_vllm = {
        path.relative_to(PACKAGE).parts[0]
        for path, tree in found.items()
        if imported_from_vllm(tree)
    }
    return {
        str(path.relative_to(ROOT)): tree
        for path, tree in sorted(found.items())
        if path.relative_to(PACKAGE).parts[0] in with_vllm
    }


@pytest.fixture(scope="module")
def names() -> Iterator[frozenset[str]]:
    """Yield the names of vLLM's methods."""
    yield methods()


REBINDINGS = (
    "scheduler.schedule = limited",
    "scheduler.schedule, scheduler.update_from_output = scheduled, updated",
    "self.scheduler._free_request_blocks, manager.get_computed_blocks = freed, looked_up",
    "self.scheduler.kv_cache_manager.allocate_slots: Any = allocate",
    "for scheduler.make_stats in ways: pass",
    "with opened() as scheduler.make_stats: pass",
    "del scheduler.schedule",
    "vars(scheduler)['schedule'] = limited",
    "scheduler.__dict__['schedule'] = limited",
    "from vllm.v1.engine.core import EngineCore\nclass Ours(EngineCore):\n def __init__(self): "
    "self.add_request = add",
)


@pytest.mark.parametrize("code", REBINDINGS)
def test_a_rebound_method_is_found(code: str, names: frozenset[str]) -> None:
    assert list(rebound_methods(ast.parse(code), names))


@pytest.mark.parametrize(
    "code",
    [
        "scheduler.max_num_scheduled_tokens = 5",
        "scheduler.hooks = LaneEvents()",
        "class Ours:\n def __init__(self): self.add_request = add",
        "plan = scheduler.schedule()",
    ],
)
def test_state_of_an_object_is_no_rebinding(code: str, names: frozenset[str]) -> None:
    assert not list(rebound_methods(ast.parse(code), names))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (
            "from vllm.distributed import parallel_state\nparallel_state._TP = group",
            "parallel_state:_TP",
        ),
        (
            "import vllm.v1.engine.core as core\ncore.EngineCore, x = Ours, 1",
            "vllm.v1.engine.core:EngineCore",
        ),
        ("import vllm.envs\nvllm.envs.VLLM_PORT = 5", "vllm.envs:VLLM_PORT"),
        (
            "from vllm.v1.request import Request\nRequest.is_finished = never",
            "request.Request:is_finished",
        ),
    ],
)
def test_a_replaced_name_of_a_module_is_found(code: str, name: str) -> None:
    assert [found.endswith(name) for found in replaced_names(ast.parse(code))] == [True]


@pytest.mark.parametrize(
    "code",
    [
        "setattr(scheduler, name, limited)",
        "setattr(scheduler, 'schedule', limited)",
        "object.__setattr__(scheduler, name, limited)",
        "vars(scheduler).update(schedule=limited)",
        "from unittest.mock import patch",
    ],
)
def test_a_setter_by_name_is_found(code: str, names: frozenset[str]) -> None:
    assert list(named_at_run_time(ast.parse(code), names))


def test_a_setter_of_another_attribute_is_no_rebinding(names: frozenset[str]) -> None:
    assert not list(named_at_run_time(ast.parse("setattr(place, 'width', 5)"), names))


# ---- the package


@pytest.mark.deep
def test_the_rooms_that_use_vllm_are_read() -> None:
    rooms = {Path(name).parts[1] for name in trees()}
    assert rooms >= {"engine", "migration", "server", "vllm_adapter", "worker"}


@pytest.mark.deep
def test_no_method_of_a_vllm_object_is_rebound(names: frozenset[str]) -> None:
    rebound = {name: list(rebound_methods(tree, names)) for name, tree in trees().items()}
    outside = {
        name: what
        for name, what in rebound.items()
        if what and ROOT / name not in PATCHES.iterdir()
    }
    assert outside == {}


def test_each_replaced_name_of_a_module_is_a_stand_in_of_the_table() -> None:
    replaced = {name: set(replaced_names(tree)) for name, tree in trees().items()}
    outside = {
        name for name, what in replaced.items() if what and ROOT / name not in PATCHES.iterdir()
    }
    assert outside == set()
    held = {stand_in.target for stand_in in STAND_INS}
    assert set().union(*replaced.values()) == held


def test_names_that_only_the_run_knows_are_set_where_it_is_said(names: frozenset[str]) -> None:
    places = {name for name, tree in trees().items() if list(named_at_run_time(tree, names))}
    assert places == set(RUN_TIME_NAMES)
