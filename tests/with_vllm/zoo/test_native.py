"""Checkpoints of models that vLLM alone has a class for: its own class loads all of them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors import safe_open

from zoo.architectures import Model, architectures, model_class
from zoo.native import Unloaded, before_maps, write_native
from zoo.native_models import NATIVE, Native

pytestmark = pytest.mark.usefixtures("classes_imported_here")


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """vLLM sets variables where it makes a configuration. No plugin is loaded."""
    with mock.patch.dict(os.environ, {"VLLM_PLUGINS": ""}):
        yield


def shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path / "model.safetensors", "numpy") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_architecture_is_of_vllm_and_not_of_transformers(name: str) -> None:
    assert name in architectures()
    assert model_class(name) is None


def test_stacked_parameters_are_taken_apart_under_names_of_the_checkpoint(tmp_path: Path) -> None:
    write_native(Model("TeleChat2ForCausalLM"), tmp_path / "model")
    tensors = shapes(tmp_path / "model")
    assert tensors["transformer.h.0.self_attention.query.weight"] == [256, 256]
    assert tensors["transformer.h.3.mlp.up_proj.weight"] == [512, 256]
    assert tensors["transformer.word_embeddings.weight"] == [512, 256]


def test_experts_are_written_one_by_one_or_together(tmp_path: Path) -> None:
    for name in ("DeepseekForCausalLM", "Step3TextForCausalLM"):
        write_native(Model(name), tmp_path / name)
    apart = shapes(tmp_path / "DeepseekForCausalLM")
    together = shapes(tmp_path / "Step3TextForCausalLM")
    assert apart["model.layers.1.mlp.experts.3.up_proj.weight"] == [128, 256]
    assert together["model.layers.1.moe.up_proj.weight"] == [4, 128, 256]


@pytest.mark.parametrize(
    ("name", "becomes", "error", "says"),
    [
        (r"\.w1\.", ".w9.", ValueError, "no module or parameter named"),
        (r"layers\.3\.(.*)w2", r"layers.2.\1w2", Unloaded, "layers.3.feed_forward.w2.weight"),
    ],
    ids=["name", "gap"],
)
def test_a_checkpoint_that_the_model_cannot_load_is_refused(
    name: str,
    becomes: str,
    error: type[Exception],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NATIVE, "InternLM2ForCausalLM", Native(names=((name, becomes),)))
    path = tmp_path / "model"
    with pytest.raises(error, match=says):
        write_native(Model("InternLM2ForCausalLM"), path)
    assert not path.exists()


def test_maps_of_names_are_undone_from_the_inside_out() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    class Inner:
        hf_to_vllm_mapper = WeightsMapper(orig_to_new_suffix={".dense": ".o_proj"})

    class Outer:
        hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"transformer.": "model."})

    modules: dict[str, Any] = {"": Outer(), "model": Inner()}
    assert before_maps("model.a.o_proj", modules) == "transformer.a.dense"
    assert before_maps("lm_head", modules) == "lm_head"
