"""Drafts by n-grams.

- `drafts.py`: the drafts of a request, a function of its tokens.
- `ngrams.py`: where n-grams have been first: one look at all tokens.
- `draws.py`: random numbers that a seeded request has drawn.
- `scheduler.py`: the steps of a scheduler with drafts.
"""
