"""One resident copy of the weights, which all lanes of an engine share (the paper's Model Weights
Manager).

- `share.py`: lane 1's weights are taken, and bound to the lanes of other degrees, by the rule of
  each layer.
- `rule.py`: what a rule says; `kinds.py`: all rules. They are in a file for each kind of layer:
  `linear.py`, `quantized.py`, `vocabulary.py`, `experts.py`, `latent.py`, `recurrent.py`,
  `adapters.py`, and `plain.py` for all that is the same on each rank.
- `store.py`, `storage.py`, `units.py`, `unit_order.py`: the bytes of a layer, and a lane's part of
  them. `layouts.py`: packed, or whole.
- `formats.py`, `gated.py`: quantized formats and activations of linear layers. `expert_forms.py`,
  `whole_experts.py`: forms of experts, and those that are not cut.
- `methods.py`: vLLM's linear methods, over a lane's part.
- `lending/`: weights that a group gives up for KV, for a while.
"""
