"""The ways of binding weights that are compared with what stock vLLM answers, by their models."""

from harness.live import ROOT

WAYS = {
    "Gemma2ForCausalLM": "the embedding is the head",
    "Olmo2ForCausalLM": "Transformers backend",
    "GPT2LMHeadModel": "fused QKV with bias",
    "Qwen2MoeForCausalLM": "MoE with shared experts",
    "GlmForCausalLM": "partial rotary",
    "BloomForCausalLM": "ALiBi",
    "GPTJForCausalLM": "parallel residual",
    "CohereForCausalLM-norms-of-heads": "norms of heads",
    "FalconForCausalLM-biases": "a bias of a fused layer that the model adds itself, for fewer KV "
    "heads than devices",
}
RECORDED = ROOT / "tests" / "stock" / "zoo.json"
"""By `python -m tests.deep.zoo.record`."""
