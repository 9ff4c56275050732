"""Requests that continue in another group with their KV cache, between engines.

- `migrations.py`: both sides in an engine, and a member's part of a pull.
- `source.py`: the side of the *owner*, which leads the group that has the KV. It makes offers.
- `incoming_requests.py`, `target.py`: the side of the *target*, which leads the group where the
  request continues. The first begins and ends arrivals, the second pulls their KV.
- `arrival.py`: a request that arrives, and its phases.
- `chunks.py`: how much is pulled next.
- `copy_plan.py`, `transfer.py`: which member copies which heads, and the copy.
- `offers.py`, `messages.py`: the memory in which offers are published; messages between engines.
- `host.py`: the engine around both sides.

docs/architecture.md has the way of a migrating request, file by file, and docs/design/protocol.md
the rules.
"""
