"""Many nodes: processes that are started, watched and started again, behind routers of other
projects. A server imports none of it.
"""
