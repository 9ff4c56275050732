"""The parameters of a model, counted by hand."""

from flying_lab.sim.models import Model


def attention_params(model: Model) -> int:
    """Of one layer."""
    return model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)


def active_params(model: Model) -> int:
    """Weights that one token is multiplied with in the layers; neither embeddings nor output
    head.
    """
    experts = max(1, model.experts_per_token)
    return model.layers * (
        attention_params(model) + experts * model.feed_forward_params + model.hidden * model.experts
    )
