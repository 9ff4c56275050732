"""The check of a GPU in ten minutes: `make cuda-check`. It writes its table into docs/cuda.md."""
