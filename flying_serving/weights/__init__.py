"""One resident copy of the weights, which all lanes of an engine share (the paper's Model Weights
Manager).

- `cuts.py`: the finest cut of each layer of a model; `formats.py`: the table of quantized formats.
- `share.py`: lane 1's weights are taken, and bound to the lanes of other degrees.
- `storage.py`, `units.py`, `unit_order.py`: the bytes of a layer, and a lane's part of them.
- A file for each kind of layer: `matrices.py`, `gated.py`, `quantized.py`, `experts.py`,
  `whole_experts.py`, `expert_forms.py`, `latent.py`, `recurrent.py`, `adapters.py`, and `plain.py`
  for all that is the same on each rank.
- `methods.py`: vLLM's linear methods, over a lane's part. `layouts.py`: packed, or whole.
- `lending/`: weights that a group gives up for KV, for a while.
"""
