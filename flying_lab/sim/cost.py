"""The time of a step: a pure function of model, device, degree and the contents of the batch.

docs/design/simulator.md has the formulas on one page. Everything that depends only on the number of
tokens is kept after its first use, so a call costs about a microsecond.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from flying_lab.sim.hardware import RANKS, AllReduce, Hardware
from flying_lab.sim.models import ACTIVATION_BYTES, Model
from flying_serving.errors import ConfigError

Execution = Literal["graph", "eager"]
GRAPH_TOKENS = 512
"""The largest batch, in tokens, that runs as one CUDA graph: vLLM's default
`max_cudagraph_capture_size`.
"""

Prefill = tuple[int, int]
"""Prompt tokens computed in a step, and tokens of the request that were computed before."""


@dataclass(frozen=True)
class _Gemm:
    """One matrix product on one device, as seconds."""

    token_s: float
    """Seconds of arithmetic per token."""
    fixed_s: float
    """Seconds to read the weights."""
    token_bytes_s: float
    """Seconds to read and write activations, per token."""


class LaneCost:
    """Seconds per step of one lane: a model that `degree` devices share by tensor parallelism.

    Raises:
        ConfigError: the degree is none of 1, 2, 4 and 8, or does not divide the query heads.
    """

    def __init__(
        self, model: Model, hardware: Hardware, degree: int, execution: Execution = "graph"
    ) -> None:
        if degree != 1 and degree not in RANKS:
            raise ConfigError(f"degree={degree!r}: must be 1 or one of {list(RANKS)}")
        if model.heads % degree:
            raise ConfigError(
                f"degree={degree!r}: must divide the {model.heads} attention heads of {model.name}"
            )
        self.model = model
        self.hardware = hardware
        self.degree = degree
        self.execution: Execution = execution
        spec, fitted = hardware.spec, hardware.coefficients
        self._flops = spec.peak_flops.value * fitted.gemm_efficiency.value
        self._bandwidth = spec.memory_bandwidth.value * fitted.memory_efficiency.value
        self._sharpness = fitted.roofline_sharpness.value
        self._gemm_overhead_s = fitted.gemm_overhead_s.value
        self._step_overhead_s = fitted.step_overhead_s.value
        self._launch_s = model.layers * fitted.eager_layer_s.value
        self._gemms = self._layer_gemms()
        self._head = self._gemm(model.hidden, model.vocab / degree, model.embedding_bytes)
        self._fixed_s = model.layers * fitted.layer_overhead_s.value
        self._elementwise_s = self._elementwise_token_bytes() / (
            spec.memory_bandwidth.value * fitted.elementwise_efficiency.value
        )
        self._pair_s = 4.0 * model.query_width / degree
        self._pair_s /= spec.peak_flops.value * fitted.attention_flops_efficiency.value
        self._key_s = model.kv_bytes_per_token(degree) / model.layers
        self._key_s /= spec.memory_bandwidth.value * fitted.attention_memory_efficiency.value
        self._tokens_time = cache(self._tokens_s)
        self._head_time = cache(self._head_s)

    def step_s(
        self, decodes: float, context_tokens: float, prefills: Sequence[Prefill] = ()
    ) -> float:
        """Return the seconds of one step.

        Args:
            decodes: requests that compute one token each; an average may be a fraction.
            context_tokens: KV tokens that these read, summed.
            prefills: prompt chunks in the batch, (new tokens, tokens before).
        """
        tokens = decodes
        for new, _ in prefills:
            tokens += new
        attention_s = self.attention_s(decodes, context_tokens, prefills)
        if tokens == 0:
            return 0.0
        gpu_s = self._tokens_time(tokens) + self._head_time(decodes + len(prefills)) + attention_s
        if self.execution == "eager" or tokens > GRAPH_TOKENS:
            gpu_s = max(gpu_s, self._launch_s)
        return gpu_s + self._step_overhead_s

    def attention_s(
        self, decodes: float, context_tokens: float, prefills: Sequence[Prefill]
    ) -> float:
        """Return the seconds of attention of one step, all layers; arguments as in `step_s`."""
        seconds = self._read_s(decodes, context_tokens)
        for new, before in prefills:
            seconds += self.prefill_attention_s(new, before)
        return seconds

    def prefill_attention_s(self, new: int, before: int) -> float:
        """Return the seconds of attention of one prompt chunk, all layers: the longer of arithmetic
        and reading keys.
        """
        model = self.model
        pairs = (model.layers - model.sliding_layers) * _pairs(new, before, new + before)
        keys = (model.layers - model.sliding_layers) * (new + before)
        if model.sliding_layers:
            pairs += model.sliding_layers * _pairs(new, before, model.sliding_window)
            keys += model.sliding_layers * min(new + before, new + model.sliding_window)
        return max(pairs * self._pair_s, keys * self._key_s)

    def gemm_times_s(self, tokens: float) -> list[float]:
        """Return the seconds of the products of one layer: QKV, output, then router, or gate with
        up, and down.
        """
        return [self._gemm_s(gemm, tokens) for gemm in self._gemms]

    def elementwise_s(self, tokens: float) -> float:
        """Return the seconds of norms, rotary embedding and activation of one layer, and the
        layer's fixed time.
        """
        return tokens * self._elementwise_s + self.hardware.coefficients.layer_overhead_s.value

    def all_reduce_s(self, message_bytes: float) -> float:
        """Return the seconds of one all-reduce over the group; 0 alone."""
        if self.degree == 1:
            return 0.0
        return all_reduce_s(
            self.hardware.all_reduce[self.degree],
            self.hardware.spec.link_bandwidth.value,
            self.degree,
            message_bytes,
        )

    def _read_s(self, decodes: float, context_tokens: float) -> float:
        """Return the seconds of decode attention: the time to read the keys and values."""
        model = self.model
        keys = (model.layers - model.sliding_layers) * context_tokens
        if model.sliding_layers:
            keys += model.sliding_layers * min(context_tokens, decodes * model.sliding_window)
        return keys * self._key_s

    def _tokens_s(self, tokens: float) -> float:
        """Return the seconds that depend on the number of tokens alone: products, elementwise
        operations, all-reduces.
        """
        model = self.model
        layer_s = sum(self.gemm_times_s(tokens))
        if model.experts:
            layer_s += self._experts_s(tokens)
        message_bytes = tokens * model.hidden * ACTIVATION_BYTES
        layer_s += 2 * self.all_reduce_s(message_bytes)
        seconds = model.layers * (layer_s + tokens * self._elementwise_s) + self._fixed_s
        # of the embedding, whose vocabulary is divided
        return seconds + self.all_reduce_s(message_bytes)

    def _head_s(self, rows: float) -> float:
        # half an all-reduce
        gather_s = self.all_reduce_s(rows * self.model.vocab * ACTIVATION_BYTES / 2)
        return self._gemm_s(self._head, rows) + gather_s

    def _gemm(self, inputs: float, outputs: float, weight_bytes: float) -> _Gemm:
        return _Gemm(
            token_s=2.0 * inputs * outputs / self._flops,
            fixed_s=inputs * outputs * weight_bytes / self._bandwidth,
            token_bytes_s=(inputs + outputs) * ACTIVATION_BYTES / self._bandwidth,
        )

    def _layer_gemms(self) -> list[_Gemm]:
        model, degree = self.model, self.degree
        query = model.query_width / degree
        kv = 2 * model.kv_width(degree)
        gemms = [
            self._gemm(model.hidden, query + kv, model.linear_bytes),
            self._gemm(query, model.hidden, model.linear_bytes),
        ]
        if model.experts:
            return [*gemms, self._gemm(model.hidden, model.experts, ACTIVATION_BYTES)]
        inner = model.intermediate / degree
        gemms.append(self._gemm(model.hidden, 2 * inner, model.linear_bytes))
        gemms.append(self._gemm(inner, model.hidden, model.linear_bytes))
        return gemms

    def _gemm_s(self, gemm: _Gemm, tokens: float) -> float:
        arithmetic_s = tokens * gemm.token_s
        memory_s = gemm.fixed_s + tokens * gemm.token_bytes_s
        return _smooth_max(arithmetic_s, memory_s, self._sharpness) + self._gemm_overhead_s

    def _experts_s(self, tokens: float) -> float:
        """Return the seconds of the experts' two products: arithmetic of all routed tokens, weights
        of the experts that tokens reach.
        """
        model = self.model
        routed = model.experts_per_token / model.experts
        touched = model.experts * (1.0 - (1.0 - routed) ** tokens)
        expert_params = model.feed_forward_params / self.degree
        arithmetic_s = 2.0 * tokens * model.experts_per_token * expert_params / self._flops
        memory_s = touched * expert_params * model.expert_bytes / self._bandwidth
        return _smooth_max(arithmetic_s, memory_s, self._sharpness) + 2 * self._gemm_overhead_s

    def _elementwise_token_bytes(self) -> float:
        """Return the bytes per token and layer of norms with residuals, rotary embedding and
        activation.
        """
        model, degree = self.model, self.degree
        norms = 2 * 4 * model.hidden
        rotary = 2 * (model.query_width / degree + model.kv_width(degree))
        activation = 3 * max(1, model.experts_per_token) * model.intermediate / degree
        return (norms + rotary + activation) * ACTIVATION_BYTES


def all_reduce_s(
    lines: AllReduce, link_bandwidth: float, ranks: int, message_bytes: float
) -> float:
    """Return the seconds of the faster of the two kernels; each moves 2 (p-1)/p of the message
    through every link.
    """
    transit_s = message_bytes * 2.0 * (ranks - 1) / ranks / link_bandwidth
    return min(
        line.latency_s.value + transit_s / line.efficiency.value
        for line in (lines.small, lines.large)
    )


def _pairs(new: int, before: int, window: int) -> float:
    """Return the query-key pairs of `new` tokens after `before` ones if each sees at most `window`
    keys, itself included.
    """
    growing = min(new, max(0, window - before))
    return growing * before + growing * (growing + 1) / 2 + (new - growing) * float(window)


def _smooth_max(a: float, b: float, sharpness: float) -> float:
    """Return a value between max and sum: the p-norm, so that neither resource is free near the
    ridge of the roofline.
    """
    high, low = (a, b) if a > b else (b, a)
    if high == 0.0:
        return 0.0
    return float(high * (1.0 + (low / high) ** sharpness) ** (1.0 / sharpness))
