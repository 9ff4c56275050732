"""Weights of real models, dropped and fetched back by layers (`weights/lending/droppable.py`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Module
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.errors import IntegrityError, Unsupported
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.loading import pack_matrix
from flying_serving.weights.lending.pages import Extent
from flying_serving.weights.lending.residency import (
    Kind,
    WorkerWeights,
    in_order,
    kind_of,
    weight_file_of,
)
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.share import SharedWeights
from flying_serving.weights.storage import PackedRows
from tests.with_vllm.weights.lending.droppable_lanes import (
    WAYS,
    WIDEST,
    DroppableLanes,
    layer,
    same,
)
from tests.with_vllm.worker.configurations import (
    BLOOM,
    FALCON,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    OPT,
    QWEN2_MOE,
    configuration,
)
from tests.with_vllm.worker.loaded import alone, load, nested, random, resident_bytes, tree, written

pytestmark = pytest.mark.usefixtures("classes_imported_here")

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"num_key_value_heads": 2},
    "llama-mqa": LLAMA | {"num_key_value_heads": 1},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "mixtral": MIXTRAL,
    "gpt-oss": GPT_OSS | {"num_local_experts": 4},
    "opt-with-biases": OPT,
}


@pytest.fixture(params=[(model, way) for model in MODELS for way in WAYS], ids="-".join)
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DroppableLanes]:
    model, way = request.param
    with alone(configuration(tmp_path, MODELS[model])) as config:
        yield DroppableLanes(config, 1, WAYS[way], written(tmp_path))


@pytest.mark.deep
def test_a_lane_that_keeps_its_weights_has_the_same_bits(worker: DroppableLanes) -> None:
    """Others refuse each layer that was dropped, and all have the same bits again when all layers
    are back.
    """
    before = {size: worker.results(size) for size in worker.lanes}
    assert all(same(results, results) for results in before.values())
    for degree in (WIDEST, 2):
        lent_bytes = sum(worker.residency.piece_bytes(degree))
        dropped = worker.drop_all(degree)
        assert sum(change.size_bytes for change in dropped) == lent_bytes > 0
        assert same(worker.results(degree), before[degree])
        refused = {
            name.removesuffix(": logits")
            for name, found in worker.results(1).items()
            if found is None
        }
        assert {change.layer for change in dropped} == refused & worker.weights.units.keys()
        fetched = worker.fetch_all()
        assert [change.layer for change in fetched] == [
            change.layer for change in reversed(dropped)
        ]
        assert sum(change.size_bytes for change in fetched) == lent_bytes
        for size, results in before.items():
            assert same(worker.results(size), results)
    worker.file.close()


@pytest.mark.parametrize("way", WAYS)
def test_engine_fetches_weights_that_another_has_written(way: str, tmp_path: Path) -> None:
    with alone(configuration(tmp_path, MODELS["llama"])) as config:
        first = DroppableLanes(config, 0, WAYS[way], written(tmp_path))
        worker = DroppableLanes(
            config, 3, WAYS[way], WeightFile(str(tmp_path), str(tmp_path), 0, writes=False)
        )
        before = worker.results(1)
        assert same(before, first.results(1))
        worker.drop_all(WIDEST)
        worker.fetch_all()
        assert same(worker.results(1), before)
    for each in (first, worker):
        each.file.close()


def test_weights_go_mlp_first_and_the_last_layer_first(tmp_path: Path) -> None:
    """Then attention, then the vocabulary; in the opposite order they are back. A partial drop is
    undone likewise.
    """
    with alone(configuration(tmp_path, MODELS["llama"])) as config:
        worker = DroppableLanes(config, 2, pack_matrix, written(tmp_path))
        names = [change.layer for change in worker.drop_all(WIDEST)]
        assert names == [
            *("model.layers.1.mlp.down_proj", "model.layers.1.mlp.gate_up_proj"),
            *("model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"),
            *("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.qkv_proj"),
            *("model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.qkv_proj"),
            *("lm_head", "model.embed_tokens"),
        ]
        assert [change.layer for change in worker.fetch_all()] == names[::-1]
        worker.residency.drop_next(WIDEST)
        assert worker.changes[-1].layer == names[0]
        assert [name for name, found in worker.results(1).items() if found is None] == [names[0]]
        with pytest.raises(
            IntegrityError, match="weights are dropped for groups of 4 engines, not of 2"
        ):
            worker.residency.drop_next(2)
        assert [change.layer for change in worker.fetch_all()] == [names[0]]
        worker.residency.drop_next(2)
        assert worker.changes[-1].layer == names[0]
    worker.file.close()


class Attends(nn.Module, AttentionLayerBase):
    """Stands for attention, as vLLM finds it."""

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        raise NotImplementedError


LINEAR = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        (layer(attn=nested(qkv=LINEAR, attn=Attends()), fc=LINEAR), {"layers.0.attn.qkv"}),
        (
            layer(attn=nested(inner=nested(attn=Attends()), out=LINEAR), mlp=nested(up=LINEAR)),
            {"layers.0.attn.out"},
        ),
        (layer(attn=Attends(), qkv=LINEAR, mlp=nested(up=LINEAR)), {"layers.0.qkv"}),
        (
            layer(attn=nested(attn=Attends(), each=nn.ModuleList([LINEAR])), fc=LINEAR),
            {"layers.0.attn.each.0"},
        ),
        (
            layer(attn=nested(attn=Attends()), moe=nested(each=nn.ModuleList([nested(up=LINEAR)]))),
            set(),
        ),
        (
            nested(stages=nn.ModuleList([layer(attn=nested(attn=Attends(), o=LINEAR), fc=LINEAR)])),
            {"stages.0.layers.0.attn.o"},
        ),
    ],
    ids=[
        "beside-attention",
        "around-it",
        "flat",
        "list-in-attention",
        "list-of-experts",
        "stages-of-layers",
    ],
)
def test_module_beside_or_around_attention_counts_as_attention(
    model: Module, attention: set[str]
) -> None:
    linear = [
        name for name, module in model.named_modules(remove_duplicate=False) if module is LINEAR
    ]
    assert {name for name in linear if kind_of(model, name) is Kind.ATTENTION} == attention


@pytest.mark.parametrize(
    ("model", "attention", "mlp"),
    [
        (LLAMA, "model.layers.0.self_attn", {"mlp.gate_up_proj", "mlp.down_proj"}),
        (OPT, "model.decoder.layers.0.self_attn", {"fc1", "fc2"}),
        (BLOOM, "transformer.h.0.self_attention", {"mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}),
        (FALCON, "transformer.h.0.self_attention", {"mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}),
        (MIXTRAL, "model.layers.0.self_attn", {"block_sparse_moe.experts.routed_experts"}),
        (
            QWEN2_MOE,
            "model.layers.0.self_attn",
            {
                "mlp.experts.routed_experts",
                "mlp.shared_expert.gate_up_proj",
                "mlp.shared_expert.down_proj",
            },
        ),
    ],
    ids=["llama", "opt", "bloom", "falcon", "mixtral", "qwen2-moe"],
)
def test_layers_of_real_models_are_told_apart(
    model: dict[str, Any], attention: str, mlp: set[str], tmp_path: Path
) -> None:
    with alone(configuration(tmp_path, model)) as config:
        modules = tree(config, 1)
    entry = attention.rpartition(".")[0] + "."
    cut = (ColumnParallelLinear, RowParallelLinear, RoutedExperts)
    names = [
        name
        for name, module in modules.named_modules()
        if isinstance(module, cut) and name.startswith(entry)
    ]
    kinds = {name.removeprefix(entry): kind_of(modules, name) for name in names}
    assert {name for name, kind in kinds.items() if kind is Kind.MLP} == mlp
    assert {name.split(".")[0] for name, kind in kinds.items() if kind is Kind.ATTENTION} == {
        attention.split(".")[-1]
    }


def test_a_layer_that_every_rank_has_whole_is_never_dropped(tmp_path: Path) -> None:
    with alone(configuration(tmp_path, LLAMA)):
        whole, cut = ColumnParallelLinear(64, 64, disable_tp=True), ColumnParallelLinear(64, 64)
        model = nested(whole=whole, cut=cut)
        load(model)
        weights = SharedWeights(model, WIDEST, pack_matrix, file := written(tmp_path))
        residency = WorkerWeights(in_order(model, weights.units), 1)
        assert len(residency.piece_bytes(WIDEST)) == 1
        residency.drop_next(WIDEST)
        residency.drop_next(WIDEST)
        with pytest.raises(IntegrityError):
            cut.quant_method.apply(cut, random(1, 64))
        whole.quant_method.apply(whole, random(1, 64))
    file.close()


def test_weights_are_kept_only_where_they_may_be_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def file_of(engine: int, sizes: tuple[int, ...], lend_weights: bool) -> WeightFile | None:
        flying = FlyingConfig(lend_weights=lend_weights)
        deployment = Deployment(
            run_dir=str(tmp_path), engines=4, devices=1, group_sizes=sizes, flying=flying
        )
        return weight_file_of(deployment, engine, 0)

    assert file_of(0, (1, 2, 4), lend_weights=False) is None
    assert file_of(0, (1,), lend_weights=True) is None
    with pytest.raises(Unsupported, match="--lend-weights: needs a group of all 4 engines"):
        file_of(0, (1, 2), lend_weights=True)
    writer, reader = (file_of(engine, (1, 2, 4), lend_weights=True) for engine in (0, 1))
    assert writer is not None
    assert reader is not None
    weight, found = torch.ones(8), torch.zeros(8)
    extent = writer.keep(weight)
    reader.keep(weight)
    writer.announce()
    reader.open()
    reader.fetch(Extent(found.data_ptr(), extent.offset_bytes, extent.size_bytes))
    assert torch.equal(found, weight)
    writer.close()
    reader.close()


@pytest.mark.deep
def test_a_hundred_cycles_free_and_take_the_same_memory(tmp_path: Path) -> None:
    """Of units of 2 MiB in oneDNN's format: resident memory falls by what is dropped, and does not
    grow.
    """
    file = written(tmp_path)
    storage = PackedRows(torch.randn(1024, 2048), None, Segment(2048, 4), pack_matrix, file)
    residency = WorkerWeights([("down", storage.units)], 0)
    product, x = storage.part(0, 1), random(2, 2048)
    before = product(x)
    levels = []
    for _ in range(100):
        assert residency.piece_bytes(4) == [6 * 2**20]
        residency.drop_next(4)
        low_bytes = resident_bytes()
        residency.fetch_next()
        assert torch.equal(product(x), before)
        levels.append((low_bytes, resident_bytes()))
    freed = [high_bytes - low_bytes for low_bytes, high_bytes in levels]
    assert min(freed) > 0.98 * 6 * 2**20
    assert max(freed) < 1.02 * 6 * 2**20
    assert abs(levels[-1][1] - levels[0][1]) < 2**18
    file.close()
