"""Drafts by n-grams: proposals, random numbers, and the steps of a scheduler with drafts."""
