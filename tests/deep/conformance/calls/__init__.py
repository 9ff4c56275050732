"""Calls of every kind that clients make, and how the answers of two servers are compared."""
