"""Nodes behind a router: started, loaded and taken away."""
