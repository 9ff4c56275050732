"""HTTP: the routes that this package adds to vLLM's, and the gate that each request passes.

- `application.py`: routes and gate in vLLM's application. `app_state.py`: what its state holds.
- `gate.py`: the gate. `incoming.py`: a request as it reaches the gate, before it is parsed.
- `access.py`: who may use which route.
- `bodies.py`: bounds of the length, time and memory of bodies.
- `overload.py`: refusals of a server that drains, ends or is full.
- `refusals.py`: refusals where vLLM has none for a client. `error_body.py`: their form.
- `routes.py`: admin routes. `layout_order.py`: the parser of an operator's order.
- `node.py`: routes for routers between nodes.
- `view.py`: routes of the live view.
"""
