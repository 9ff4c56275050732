"""Token parallel steps: shares of tokens, and heads that members exchange for them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.aux_output import AuxOutputConfig
from vllm.model_executor.layers.activation import GeluAndMulSparse
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from flying_serving.comm.shm import ShmGroup
from flying_serving.vllm_adapter.distributed.coordinator import LaneCoordinator
from flying_serving.vllm_adapter.model_runner import token_parallel
from flying_serving.vllm_adapter.model_runner.rank_widths import widths_of_ranks
from flying_serving.vllm_adapter.model_runner.token_parallel import (
    HeadExchange,
    Shares,
    TokenParallel,
    obstacle,
)

WIDTH = 3
"""Of a head."""


@given(tokens=st.integers(1, 50), members=st.integers(1, 8))
def test_shares_are_all_tokens_in_their_order(tokens: int, members: int) -> None:
    rows, positions = torch.randn(tokens, 4), torch.randn(3, tokens)
    shares = [Shares(tokens, rank, members) for rank in range(members)]
    assert torch.equal(torch.cat([one.own(rows) for one in shares])[:tokens], rows)
    of_positions = torch.cat([one.own(positions, 1) for one in shares], 1)
    assert torch.equal(of_positions[:, :tokens], positions)
    assert not of_positions[:, tokens:].any()
    for rank, one in enumerate(shares):
        assert one.own(rows).shape == (one.each, 4)
        assert torch.equal(one.each_member(rows)[rank], one.own(rows))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Return causal attention of all tokens, shape (tokens, heads x WIDTH)."""
    query, key, value = (x.reshape(len(x), -1, WIDTH).transpose(0, 1) for x in (q, k, v))
    shared = heads // len(key)
    key, value = (x.repeat_interleave(shared, 0) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(0, 1).reshape(len(q), -1)


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("tokens", [5, 16])
def test_members_attend_by_their_heads_what_one_does_by_all(
    tmp_path: Path, members: int, heads: int, kv_heads: int, tokens: int
) -> None:
    """A head of KV goes to each member that has it, as in vLLM's tensor parallel layers."""
    q, k, v = (torch.randn(tokens, count * WIDTH) for count in (heads, kv_heads, kv_heads))
    whole: Any = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads)
    held = max(1, kv_heads // members)

    def own(rank: int) -> Callable[..., torch.Tensor]:
        first = rank * kv_heads // members * WIDTH

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
            assert torch.equal(k, kept[0][:, first : first + held * WIDTH])
            assert torch.equal(v, kept[1][:, first : first + held * WIDTH])
            return attention(q, k, v, heads // members)

        return attend

    kept = (k, v)
    groups = [ShmGroup(str(tmp_path / "group"), rank, members) for rank in range(members)]

    def member(rank: int) -> torch.Tensor:
        coordinator = LaneCoordinator(rank, [list(range(members))], f"heads{rank}", 0)
        coordinator.device_communicator.use(groups[rank])
        shares = Shares(tokens, rank, members)
        layer = HeadExchange(whole, own(rank), coordinator, shares)  # type: ignore[arg-type]
        return layer.forward(shares.own(q), shares.own(k), shares.own(v))

    with ThreadPoolExecutor(members) as pool:
        found = torch.cat(list(pool.map(member, range(members))))[:tokens]
    torch.testing.assert_close(found, attention(q, k, v, heads))
    for group in groups:
        group.close()


# ---- which lanes have them


def layer(heads: int, kv_heads: int, kind: type = Attention, **more: Any) -> Any:
    """Return a layer of a class of vLLM, with its number of heads."""
    made: Any = object.__new__(kind)
    fields = {"num_heads": heads, "num_kv_heads": kv_heads, "attn_type": AttentionType.DECODER}
    made.__dict__.update(fields | more)
    return made


def runner(
    layers: dict[str, Any], lora: Any = None, *, returns_experts: bool = False, **of_vllm: Any
) -> Any:
    """Return a lane's runner with these layers."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        lora_config=lora,
        aux_output_config=AuxOutputConfig(enable_return_routed_experts=returns_experts),
    )
    return SimpleNamespace(config=config, vllm_runner=SimpleNamespace(**of_vllm))


class Recurrent(AttentionLayerBase):
    """A layer with a state in place of KV of tokens."""

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, _config: Any) -> Any:
        raise NotImplementedError


PLAIN = runner({"attn": layer(8, 4), "experts": object()})
HALVED = runner({"attn": layer(4, 2), "experts": object()})


def test_a_lane_with_attention_by_heads_has_them() -> None:
    assert obstacle(PLAIN, HALVED, 2) is None
    assert obstacle(PLAIN, runner({"attn": layer(1, 1)}), 8) is None


@pytest.mark.parametrize(
    ("lane1", "why"),
    [
        (runner({"attn": layer(8, 4)}, lora=object()), "adapters"),
        (runner({"attn": layer(8, 4), "x": Recurrent()}), "layers of the kind Recurrent"),
        (
            runner({"attn": layer(8, 4, attn_type=AttentionType.ENCODER)}),
            "layers of the kind Attention",
        ),
        (runner({"attn": layer(6, 3)}), "6 heads and 3 of KV"),
        (
            runner({"attn": layer(8, 4)}, returns_experts=True),
            "outputs beside tokens (--enable-return-routed-experts)",
        ),
        (
            runner({"attn": layer(8, 4)}, use_aux_hidden_state_outputs=True),
            "drafts that read the states of layers",
        ),
    ],
)
def test_others_say_why_they_have_none(lane1: Any, why: str) -> None:
    assert obstacle(lane1, HALVED, 2) == why


# ---- what lane 1's modules compute of a share


class Sparse(nn.Module):
    """A model whose activation depends on the columns of a rank, as Gemma 3n."""

    def __init__(self) -> None:
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            self.act = GeluAndMulSparse(activation_sparsity=0.95, approximate="tanh")

    def forward(self, *, inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        found: torch.Tensor = self.act(inputs_embeds)
        return found


def test_activations_see_the_columns_of_a_rank_as_in_tensor_parallel_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request has the outputs of its group's degree, in whichever way a step is made."""
    context = SimpleNamespace(no_compile_layers={}, all_moe_layers=None)
    monkeypatch.setattr(token_parallel, "get_forward_context", lambda: context)
    lane1, lane = runner({}), runner({})
    lane1.config.model_config = SimpleNamespace(enforce_eager=True)
    lane1.model, lane.model = Sparse(), nn.Module()
    lane1.active = nullcontext
    lane.graphs = SimpleNamespace(unused=nullcontext)
    group = SimpleNamespace(rank_in_group=0, world_size=2, all_gather=lambda x, dim: x)
    x = torch.randn(5, 128)
    with TokenParallel(lane, lane1, group).used():
        found = lane.model(positions=torch.arange(5), inputs_embeds=x)
    with widths_of_ranks(lane1.model, 2):
        expected = lane1.model(inputs_embeds=x[:3])
    assert torch.equal(found, expected)
    assert not torch.equal(found, lane1.model(inputs_embeds=x[:3]))
