"""Mutants: small edits of the product, each of which a unit test of its area should find."""
