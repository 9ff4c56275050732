"""Requests: the fields that a client sends, the checks before an answer begins, and the streams of
tokens.
"""
