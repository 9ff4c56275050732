"""Write a tiny random model: `python -m flying_lab.tiny_models llama /tmp/llama`."""

import argparse
import sys
from pathlib import Path

from flying_lab.tiny_models.checkpoint import SHAPES, make_model, weights_hash


def main() -> None:
    """Write one model from the command line."""
    parser = argparse.ArgumentParser(
        "python -m flying_lab.tiny_models", description="write a tiny random model"
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    path = make_model(options.path, options.shape, seed=options.seed)
    sys.stdout.write(f"{path}: {options.shape}, weights {weights_hash(path)}\n")


if __name__ == "__main__":
    main()
