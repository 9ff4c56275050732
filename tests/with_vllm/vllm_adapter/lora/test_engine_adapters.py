"""EngineAdapters: an engine loads the bytes that all engines load, or makes the step without."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from flying_lab.tiny_models.adapters import make_adapter
from flying_serving.errors import AdapterNotLoaded
from flying_serving.vllm_adapter.lora.engine_adapters import RETRY_S, EngineAdapters
from flying_serving.vllm_adapter.lora.files import CONFIG_FILE, WEIGHT_FILES
from flying_serving.vllm_adapter.lora.layers import LaneAdapters
from flying_serving.vllm_adapter.lora.notes import AdapterNotes
from harness.live import tiny
from tests.with_vllm.worker.configurations import configuration
from tests.with_vllm.worker.loaded import CPU, alone, load, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

SLOTS = 2
CHANGED = "the files of adapter 'a' have changed since it was loaded: unload it, and load it again"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[VllmConfig]:
    model = json.loads((tiny("llama") / "config.json").read_text())
    with alone(configuration(tmp_path, model)) as made:
        made.lora_config = LoRAConfig(
            max_lora_rank=8, max_loras=SLOTS, max_cpu_loras=SLOTS, lora_dtype=torch.float32
        )
        yield made


class AdaptersOfEngine:
    """Lane 1's adapters of one engine of a server, and the adapters a, b and c on disk."""

    def __init__(self, config: VllmConfig, run_dir: Path, number: int) -> None:
        self.now_s = 100.0
        self.run_dir = run_dir
        model = tree(config, 1)
        load(model)
        manager = LRUCacheWorkerLoRAManager(config, CPU, {})
        with set_current_vllm_config(config):
            manager.create_lora_manager(model, config)
        self.adapters: Any = EngineAdapters(manager, str(run_dir), number, lambda: self.now_s)
        self.requests = {
            name: LoRARequest(name, seed, str(make_adapter(run_dir / name, "llama", seed=seed)))
            for seed, name in enumerate("abc", 1)
        }

    def folder(self, name: str) -> Path:
        return Path(self.requests[name].lora_path)

    def step(self, *names: str) -> tuple[int, ...]:
        """A step with a token of each adapter, and one without. Returns the slots of its tokens."""
        requests = {self.requests[name] for name in names}
        tokens = (0, *(self.requests[name].lora_int_id for name in names))
        self.adapters.set_active_adapters(requests, LoRAMapping(tokens, tokens, is_prefill=True))
        products = self.adapters._adapter_manager.punica_wrapper_mapping.values()
        slots: list[int] = next(iter(products)).token_lora_indices.tolist()
        return tuple(slots)

    def has(self, name: str) -> bool:
        return self.requests[name].lora_int_id in self.adapters.list_adapters()

    def lacks(self, name: str, since_s: float = 0.0) -> str | None:
        notes = AdapterNotes(str(self.run_dir))
        return notes.failure((0, 1), self.requests[name].lora_int_id, since_s)


@pytest.fixture
def engine(config: VllmConfig, tmp_path: Path) -> AdaptersOfEngine:
    return AdaptersOfEngine(config, tmp_path, 0)


def write_others(engine: AdaptersOfEngine, name: str) -> None:
    """Overwrite an adapter's weights with those of another one."""
    other = make_adapter(engine.run_dir / "other", "llama", seed=9)
    shutil.copy(other / WEIGHT_FILES[0], engine.folder(name) / WEIGHT_FILES[0])


def evict(engine: AdaptersOfEngine, name: str) -> None:
    engine.step(*[other for other in "abc" if other != name])
    assert not engine.has(name)


def test_an_adapter_that_was_evicted_is_read_again(engine: AdaptersOfEngine) -> None:
    engine.adapters.add_adapter(engine.requests["a"])
    evict(engine, "a")
    assert min(engine.step("a")[1:]) >= 0
    assert engine.lacks("a") is None


def test_a_folder_with_other_weights_gives_none(engine: AdaptersOfEngine) -> None:
    """Neither the old weights nor the new ones are computed with, and the engine goes on."""
    engine.adapters.add_adapter(engine.requests["a"])
    evict(engine, "a")
    write_others(engine, "a")
    assert engine.step("a", "b")[:2] == (-1, -1)
    assert engine.step("b")[1] >= 0
    assert engine.lacks("a") == CHANGED
    assert engine.lacks("b") is None


def test_an_engine_that_is_back_loads_what_the_others_have(
    engine: AdaptersOfEngine, config: VllmConfig
) -> None:
    engine.adapters.add_adapter(engine.requests["a"])
    write_others(engine, "a")
    back = AdaptersOfEngine(config, engine.run_dir, 1)
    with pytest.raises(AdapterNotLoaded, match=CHANGED):
        back.adapters.add_adapter(back.requests["a"])
    assert back.step("a") == (-1, -1)
    assert engine.step("a")[1] >= 0  # it has the adapter still


@pytest.mark.parametrize("damage", ["gone", "short", "no json"])
def test_a_folder_that_is_gone_or_damaged_ends_no_step(
    engine: AdaptersOfEngine, damage: str
) -> None:
    engine.adapters.add_adapter(engine.requests["a"])
    evict(engine, "a")
    if damage == "gone":
        shutil.rmtree(engine.folder("a"))
    elif damage == "short":
        (engine.folder("a") / WEIGHT_FILES[0]).write_bytes(b"x")
    else:
        (engine.folder("a") / CONFIG_FILE).write_text("{")
    assert engine.step("a") == (-1, -1)
    why = engine.lacks("a")
    assert why is not None
    assert ("engine 0 cannot read adapter 'a' again: LoRA" if damage == "gone" else CHANGED) in why


def test_a_file_that_is_cut_short_leaves_loaded_weights_as_they_are(
    engine: AdaptersOfEngine,
) -> None:
    """vLLM maps the file: pages behind its new end would end the process."""
    engine.adapters.add_adapter(engine.requests["a"])
    (engine.folder("a") / WEIGHT_FILES[0]).write_bytes(b"")
    loaded = engine.adapters._adapter_manager.get_adapter(1)
    for layer in loaded.loras.values():
        parts = layer.lora_a if isinstance(layer.lora_a, list) else [layer.lora_a]
        assert all(part.isfinite().all() for part in parts if part is not None)


def test_a_step_keeps_its_adapters_that_are_loaded(engine: AdaptersOfEngine) -> None:
    """The one that it loads takes the place of another, whatever their order."""
    for order in (("a", "b"), ("b", "c"), ("c", "a")):
        engine.step(*order[:1])
        shutil.rmtree(engine.folder(order[0]))
        assert min(engine.step(*order)[1:]) >= 0
        make_adapter(engine.folder(order[0]), "llama", seed="abc".index(order[0]) + 1)


def test_an_adapter_that_failed_is_read_again_after_a_while(
    engine: AdaptersOfEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = engine.run_dir / "away"
    engine.folder("a").rename(away)
    engine.step("a")
    away.rename(engine.folder("a"))
    engine.now_s += RETRY_S
    assert engine.step("a") == (-1, -1)
    assert engine.lacks("a", since_s=engine.now_s) is not None
    engine.now_s += 0.1
    assert engine.step("a")[1] >= 0
    assert engine.lacks("a", since_s=engine.now_s) is None


def test_a_lane_of_a_group_makes_its_step_without_it_too(engine: AdaptersOfEngine) -> None:
    shutil.rmtree(engine.folder("a"))
    lane: Any = LaneAdapters(engine.adapters, engine.adapters._adapter_manager)
    mapping = LoRAMapping((1, 2, 0), (1, 2, 0), is_prefill=True)
    lane.set_active_adapters({engine.requests["a"], engine.requests["b"]}, mapping)
    products = next(iter(lane._adapter_manager.punica_wrapper_mapping.values()))
    slots = products.token_lora_indices.tolist()
    assert (slots[0], slots[2]) == (-1, -1)
    assert slots[1] >= 0


def test_errors_name_the_folder_of_the_user(engine: AdaptersOfEngine) -> None:
    """And no copy."""
    other = make_adapter(engine.run_dir / "of another", "llama", seed=3, targets=("lm_head",))
    request = LoRARequest("x", 8, str(other))
    engine.adapters._adapter_manager.supported_lora_modules.remove("lm_head")
    with pytest.raises(ValueError, match=f"^While loading {other}, expected"):
        engine.adapters.add_adapter(request)
    shutil.rmtree(other)
    with pytest.raises(LoRAAdapterNotFoundError, match=f"No adapter found for {other}"):
        engine.adapters.add_adapter(request)


@pytest.mark.parametrize("name", WEIGHT_FILES[:2])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_numbers_that_are_not_finite_are_not_kept(
    engine: AdaptersOfEngine, name: str, part: str
) -> None:
    """Also of a pickled file, which only vLLM reads."""
    folder = engine.folder("a")
    tensors = load_file(folder / WEIGHT_FILES[0])
    for key in tensors:
        if f"layers.0.self_attn.v_proj.{part}" in key:
            tensors[key] = tensors[key] * float("inf")
    (folder / WEIGHT_FILES[0]).unlink()
    save = save_file if name == WEIGHT_FILES[0] else torch.save
    save(tensors, folder / name)
    layer = r"model\.layers\.0\.self_attn\.\w+"
    says = rf"^adapter 'a': {name}: {part[-1]} of {layer} has (-?inf|nan) after scaling"
    with pytest.raises(AdapterNotLoaded, match=says):
        engine.adapters.add_adapter(engine.requests["a"])
    assert not engine.has("a")
    assert engine.step("a", "b")[1] == -1
