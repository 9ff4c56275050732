"""Token parallel steps of a group's lane, by the modules of lane 1, which have all weights of an
engine.

The lane's runner prepares a step as always: all tokens, the lane's block tables and metadata. Only
the call of its model differs. Each member computes its share of the tokens. Before attention the
members exchange them, so that each has all tokens of its heads. The lane's own attention layer then
writes and reads the group's KV as in a tensor parallel step. After it they exchange back. From the
gathered hidden states on, all is the lane's again.

An engine of several devices computes its share tensor parallel. Each of its devices exchanges with
the same device of the other engines. A lane's ranks are in the order of devices and then of
engines, so a device has the same heads in all lanes, divided further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import pad
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from flying_serving.vllm_adapter.distributed.coordinator import exchange
from flying_serving.vllm_adapter.model_runner.compiled import is_compiled, uncompiled
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.rank_widths import (
    activations_by_width,
    widths_of_ranks,
)


def obstacle(lane1: DeviceLane, lane: DeviceLane, size: int) -> str | None:
    """Return why steps of a lane for `size` engines cannot be token parallel; None if they can."""
    config = lane1.config
    if config.lora_config is not None:
        return "adapters"
    own, whole = _layers(lane), _layers(lane1)
    for name, layer in whole.items():
        if not isinstance(layer, AttentionLayerBase):
            continue
        if not isinstance(layer, Attention) or layer.attn_type != AttentionType.DECODER:
            return f"layers of the kind {type(layer).__name__}"
        heads, kv_heads = size * own[name].num_heads, max(1, layer.num_kv_heads // size)
        if (heads, kv_heads) != (layer.num_heads, own[name].num_kv_heads):
            return f"{layer.num_heads} heads and {layer.num_kv_heads} of KV"
    if config.aux_output_config.enabled:
        return "outputs beside tokens (--enable-return-routed-experts)"
    if getattr(lane1.vllm_runner, "use_aux_hidden_state_outputs", False):
        return "drafts that read the states of layers"
    return None


@dataclass(frozen=True)
class Shares:
    """The tokens of a step, divided evenly over the members of a group. The last shares may end
    with rows of no token, which are zero.

    `rank`: of this member, of `members`.
    """

    tokens: int
    rank: int
    members: int

    @property
    def each(self) -> int:
        """The rows of a share."""
        return -(-self.tokens // self.members)

    def own(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this member's share of a tensor of all tokens along `dim`."""
        begin = min(self.rank * self.each, self.tokens)
        there = min(self.each, self.tokens - begin)
        return _extended(rows.narrow(dim, begin, there), self.each, dim)

    def each_member(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the shares of all members, shape (members, rows, width), of one of all tokens."""
        return _extended(rows, self.members * self.each).view(self.members, self.each, -1)


@dataclass(frozen=True)
class HeadExchange:
    """An attention layer of lane 1 whose tokens are a share, of all heads.

    `whole`: the layer. `own`: the lane's, which has this member's heads. `group`: the members.
    """

    whole: Attention
    own: Attention
    group: Any
    shares: Shares

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return what the layer does: the attention of its tokens, shape (share, width)."""
        sent = [self._by_member(query, self.whole.num_heads)]
        of_kv = [x for x in (key, value) if x is not None]
        sent += [self._by_member(x, self.whole.num_kv_heads) for x in of_kv]
        widths = [part.shape[-1] for part in sent]
        received = exchange(self.group, torch.cat(sent, -1)).flatten(0, 1)
        q, *kv = received[: self.shares.tokens].split(widths, -1)
        attended = self.own(q, *(kv or (None, None)), output_dtype=output_dtype)
        mine = exchange(self.group, self.shares.each_member(attended))
        return mine.transpose(0, 1).reshape(self.shares.each, -1)

    def _by_member(self, rows: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the heads of each member, shape (members, share, width), of rows of all heads.

        Where there are fewer heads than members, several members have the same one.
        """
        count, members = rows.shape[0], self.shares.members
        by_head = rows.reshape(count, heads, -1)
        if heads < members:
            by_head = by_head.repeat_interleave(members // heads, dim=1)
        return by_head.reshape(count, members, -1).transpose(0, 1)


class TokenParallel:
    """The token parallel steps of one lane.

    Args:
        lane: whose requests, KV and metadata a step has.
        lane1: whose modules compute it.
        group: the coordinator of this device in each member.
    """

    def __init__(self, lane: DeviceLane, lane1: DeviceLane, group: Any) -> None:
        self._lane = lane
        self._lane1 = lane1
        self._group = group
        own, whole = _layers(lane), _layers(lane1)
        self._attention = [
            (layer, own[name]) for name, layer in whole.items() if isinstance(layer, Attention)
        ]
        # vLLM looks layers up by name: attention is the lane's, the rest of a step is lane 1's
        self._by_name = own | {
            name: layer for name, layer in whole.items() if not isinstance(layer, Attention)
        }
        self._is_compiled = is_compiled(lane1.config)
        self._sees_widths = bool(activations_by_width(lane1.model))

    @contextmanager
    def used(self) -> Iterator[None]:
        """While the body runs, the lane's steps are token parallel."""
        with self._lane.graphs.unused(), _forward_of(self._lane.model, self._forward):
            yield

    def _forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the hidden states of all tokens, as the lane's model does, shape (tokens,
        width).
        """
        assert positions is not None
        tokens = positions.shape[-1]
        shares = Shares(tokens, self._group.rank_in_group, self._group.world_size)
        with self._modules_of_lane1(shares):
            hidden = self._lane1.model(
                input_ids=None if input_ids is None else shares.own(input_ids),
                positions=shares.own(positions, positions.dim() - 1),
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=None if inputs_embeds is None else shares.own(inputs_embeds),
                **options,
            )
        gathered: torch.Tensor = self._group.all_gather(hidden, dim=0)
        return gathered[:tokens]

    @contextmanager
    def _modules_of_lane1(self, shares: Shares) -> Iterator[None]:
        """While the body runs, lane 1's modules compute a share of a step of the lane."""
        context = get_forward_context()
        layers, experts = context.no_compile_layers, context.all_moe_layers
        with ExitStack() as stack:
            stack.enter_context(self._lane1.active())
            if self._is_compiled:  # the lane's step has eager operations already
                stack.enter_context(uncompiled(self._lane1.model))
            if self._sees_widths:  # as in a tensor parallel step
                stack.enter_context(widths_of_ranks(self._lane1.model, shares.members))
            for whole, own in self._attention:
                heads = HeadExchange(whole, own, self._group, shares)
                stack.enter_context(_forward_of(whole, heads.forward))
            context.no_compile_layers = self._by_name
            if experts is not None:
                of_lane1 = self._lane1.config.compilation_config.static_all_moe_layers
                context.all_moe_layers = of_lane1
            try:
                yield
            finally:
                context.no_compile_layers, context.all_moe_layers = layers, experts


def _extended(rows: torch.Tensor, count: int, dim: int = 0) -> torch.Tensor:
    """Return a tensor with zeros after its end along `dim`, so that it has `count` rows there."""
    short = count - rows.shape[dim]
    return pad(rows, [0, 0] * (rows.dim() - 1 - dim) + [0, short]) if short else rows


def _layers(lane: DeviceLane) -> dict[str, Any]:
    """Return the layers that vLLM looks up by name while a lane's model computes."""
    layers: dict[str, Any] = lane.config.compilation_config.static_forward_context
    return layers


@contextmanager
def _forward_of(module: Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While the body runs, a module computes by `forward`."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
