"""The check of a GPU in ten minutes: `python -m benchmarks.cuda_check --out DIR`."""
