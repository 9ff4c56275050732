"""The choice of the layout: policies over a snapshot. Pure.

- `snapshot.py`: a policy's input, the state of the cluster at one moment, and its answer.
- `policies.py`: the policies. `ranking.py`: the figure by which layouts are ranked for load.
- `switching.py`: the cost of a switch in each mode. `regret.py`: what a layout loses while a better
  one is predicted.
- `split.py`: where a request is split over two groups (DynaServe).
- `transformations.py`: which engines join for a long request, and when a group parts (Gyges).
- `steering.py`: the fields of a request that steer the node.
"""
