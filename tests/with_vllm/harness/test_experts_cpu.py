"""Weights of experts that a server keeps are those that it would make for each product."""

import torch

from harness.experts_cpu.kernel import KeptMatrices, matrix_of


def test_kept_weights_are_those_of_each_expert_of_each_layer() -> None:
    layers = [torch.randn(2, 128, 128).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.rand(2, 1, 1) for _ in layers]
    kept = KeptMatrices()
    for _ in range(2):
        for weights, scale in zip(layers, scales, strict=True):
            for expert in range(2):
                expected = matrix_of(weights, scale, expert)
                assert torch.equal(kept(weights, scale, expert), expected)
            part = weights[:, :64]
            assert torch.equal(kept(part, scale, 0), matrix_of(part, scale, 0))


def test_each_weight_is_made_once() -> None:
    weights, kept = torch.randn(1, 8, 8), KeptMatrices()
    assert kept(weights, None, 0) is kept(weights, None, 0)
