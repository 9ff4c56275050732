"""Tiny random models with a tokenizer, on disk, in Hugging Face format, for the demo, the tests and
the benchmarks.
"""
