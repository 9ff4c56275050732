"""Requests that continue in another group with their KV cache, between engines.

The walk of a migrating request. Its *owner* leads the group that has the KV; its *target* leads the
group where the request continues. An `Offer` is the KV that the owner shows. A `KVSource` is the
owner's group and the number of the offer: there the target finds it. docs/protocol.md has the
rules.

1. Offer. The API server tells the owner that the request leaves (`Migrations.retain`). The owner
   takes it out of its scheduler, keeps its blocks, and publishes them as an offer (`source.py`) in
   memory that all engines read (`offers.py`).
2. Arrival. The API server adds the request to the target (`IncomingRequests.expect`). It is an
   `Arrival` from then on, in one phase after the other (`arrival.py` says where each begins).
3. Pull. Between two steps the target reads the offer, sets blocks aside and has the next chunk
   copied (`Target.advance`; `chunks.py` says how much). In a group each member copies its heads
   (`PullKV`, `transfer.py`) and answers (`KVPulled`). A copy counts if it is still offered then.
4. Admission. With its KV here, the request goes to the queue of the lane
   (`IncomingRequests.admit`, `LaneRequests.enqueue`). The owner may free the blocks (`ReleaseKV`).
5. Fallback. If the offer is late or revoked, the request is admitted with the KV that is here
   (`give_up`). If blocks are missing for too long, it is admitted with none. Its scheduler prefills
   the other tokens.
6. Forward. A request may leave the target before it is admitted. The target retains it, with the
   KV that is here, and offers it to a third group (`IncomingRequests.forward`).

A request that still runs elsewhere may be *prefetched*: its KV is pulled while it is computed, and
the request itself is added later.
"""
