"""The laboratory: workloads, replays, reports, the simulator and the demo. A server imports none of
it.
"""
