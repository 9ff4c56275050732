"""Requests that no client should send, by the thousand, against a live server."""
