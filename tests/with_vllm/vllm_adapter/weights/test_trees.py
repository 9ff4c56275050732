"""Module trees without weights: kinds of layers, and addresses without memory."""

import torch
from torch.nn import Linear, Module, ModuleList, Parameter
from torch.utils import swap_tensors

from flying_serving.vllm_adapter.weights.trees import give_data, hold_parameters, layer_kinds


class Layer(Module):
    def __init__(
        self, shared: Module, width: int = 4, window: int | None = None, target: str | None = None
    ) -> None:
        super().__init__()
        self.shared = shared
        self.up = Linear(4, width, device="meta")
        self.up.sliding_window = window
        self.up.kv_sharing_target_layer_name = target


def model(*layers: Layer) -> Module:
    tree = Module()
    tree.layers = ModuleList(layers)
    return tree


def test_layers_are_of_a_kind_by_shape_window_and_kv() -> None:
    """What they share, as rotary tables, is a part of each, not of the first alone."""
    rope = Linear(1, 1)
    alike = model(Layer(rope), Layer(rope), Layer(rope))
    assert list(layer_kinds(alike).values()) == [0]
    mixed = model(
        Layer(rope),
        Layer(rope),
        Layer(rope, width=8),
        Layer(rope, window=2),
        Layer(rope),
        Layer(rope, target="a"),
    )
    assert sorted(layer_kinds(mixed).values()) == [0, 2, 3, 5]
    assert layer_kinds(alike).keys() < layer_kinds(mixed).keys()


def test_lists_are_told_apart_and_counted_as_numbers() -> None:
    tree = model(*(Layer(Linear(1, 1)) for _ in range(11)), Layer(Linear(1, 1), width=8))
    tree.others = ModuleList([Layer(Linear(1, 1))])
    assert sorted((place, number) for (place, _), number in layer_kinds(tree).items()) == [
        ("layers", 0),
        ("layers", 11),
        ("others", 0),
    ]


def test_given_data_has_an_address_and_no_memory() -> None:
    """Whoever holds a parameter has it too; shapes, types, ties and the values of what is real
    stay.
    """
    tree = Module()
    tree.real = Linear(2, 2)
    tree.large = Linear(10**6, 10**6, bias=False, device="meta", dtype=torch.bfloat16)
    tree.register_buffer("table", torch.empty(3, 5, device="meta"))
    tree.tied = Module()
    tree.tied.weight = tree.large.weight
    held, before = tree.large.weight, tree.real.weight.clone()
    give_data(tree)
    assert held is tree.large.weight is tree.tied.weight
    assert isinstance(held, Parameter)
    assert held.shape == (10**6, 10**6)
    assert held.dtype == torch.bfloat16
    assert held.device.type == "cpu"
    assert held.untyped_storage().nbytes() == 2
    assert held.data_ptr() != tree.table.data_ptr() != 0
    assert not isinstance(tree.table, Parameter)
    assert tree.table.shape == (3, 5)
    assert torch.equal(tree.real.weight, before)


def test_second_name_of_a_parameter_is_replaced_with_it() -> None:
    """A router of vLLM's keeps the data of its bias, and a lane gets another bias afterwards."""
    router = Linear(4, 4, device="meta")
    router.correction, router.doubled = router.bias.data, router.bias.data * 2
    router.rows = router.weight.data[1:]
    hold_parameters(router)
    swap_tensors(router.bias, Parameter(torch.arange(4.0)))
    assert torch.equal(router.correction, torch.arange(4.0))
    assert router.doubled.is_meta
    assert router.rows.is_meta
