"""The smoke suite: what a server does, on two servers that live for the whole session.

One has two engines, the other four. Both serve a tiny random llama in float32. In this order they
are easiest to read:

- `test_tokens.py`: each layout answers what stock vLLM answers;
- `test_switches.py`: the layout changes in each of the five modes while requests stream;
- `test_loss.py`: an engine is killed while requests stream, and comes back;
- `test_metrics.py`: what an operator sees;
- `test_errors.py`: how a wrong use is answered, one of each kind.

`four_requests.py` has the requests of all of them, and what stock vLLM answers to these.
"""
