"""A small program on the library: what is in a checkpoint, and how far did training move it?

``python weights.py CHECKPOINT [OTHER]``: a step folder such as ``RUN/checkpoints/global_step_20``, of whichever backend
and format, or a Hugging Face folder. It needs no Ray and no verl, and reads one tensor at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trinity_sync.checkpoint.reading import open_weights
from trinity_sync.errors import TrinityError


def main(folder: Path, other: Path | None = None) -> None:
    """Print the tensors of a checkpoint and its digest; with another one, how far each tensor moved."""
    weights = open_weights(folder)
    before = None if other is None else open_weights(other)
    for name in weights:
        info = weights.info(name)
        line = f"{name:<48} {info.dtype:<5} {'x'.join(map(str, info.shape)):>10}"
        if before is not None and name in before:
            moved = (weights.read(name).float() - before.read(name).float()).abs()
            line += f"  mean {moved.mean():.2e}  most {moved.max():.2e}"
        print(line)
    print(f"{len(weights)} tensors, {weights.format}; digest in bf16: {weights.digest('BF16')}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*map(Path, sys.argv[1:]))
    except TrinityError as error:
        sys.exit(f"error: {error}")
