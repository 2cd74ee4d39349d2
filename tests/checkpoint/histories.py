"""A history of versions without a run: bases and deltas of small models, as the publisher leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.checkpoint import written
from trinity_sync.checkpoint.folder.commits import commit_folder, keep_weights, prepare_staging
from trinity_sync.checkpoint.folder.contents import Manifest, step_dir
from trinity_sync.protocol.parts import HISTORY, delta_file, version_folder
from trinity_sync.weights.part_delta import PartEncoder, VersionIndex
from trinity_sync.weights.shard_file import open_shard_file
from trinity_sync.weights.tensors import state_digest

Tensors = Mapping[str, torch.Tensor]


def commit_weights(root: Path, step: int, tensors: Tensors, *, attempt: int = 0) -> Path:
    """Commit a weights-only checkpoint of two parts, with the model's config."""
    actor = prepare_staging(root, step, attempt) / "actor"
    written.write_companions(written.small_model("tied"), actor)
    written.write_parts(actor, tensors, 2)
    digest = state_digest(dict(tensors), "BF16")
    commit_folder(root, Manifest(step=step, attempt=attempt, kind="state_dict", digest=digest))
    return step_dir(root, step)


def remember(root: Path, attempt: int, first: int, states: Sequence[Tensors]) -> None:
    """Keep the versions of an attempt: a base, and a delta for each later one."""
    deltas, encoders, before = root / ".deltas", dict[str, PartEncoder](), list[Path]()
    with ThreadPoolExecutor(1) as pool:
        for step, state in enumerate(states, first):
            folder = version_folder(deltas, (attempt, step))
            files = written.write_parts(root.parent / "states" / folder.name, state, 2)
            base, starts = None, []
            if step == first:
                keep_weights(
                    commit_weights(root, step, state, attempt=attempt), folder / f"global_step_{step}", durable=False
                )
                base = f".deltas/{folder.name}/global_step_{step}"
            else:
                folder.mkdir(parents=True)
                starts = [((attempt, step - 1), 1)]
                for old, new in zip(before, files, strict=True):
                    (layout, newer), (_, older) = open_shard_file(new), open_shard_file(old)
                    encoder = encoders.setdefault(layout.part, PartEncoder(layout, "gap8z"))
                    one, *_ = encoder.encode((attempt, step - 1), (attempt, step), (older, newer), pool)
                    (folder / delta_file(layout.part, one.start)).write_bytes(b"".join(one.parts))
            VersionIndex(base, starts, state_digest(dict(state), "BF16")).write(folder / HISTORY, durable=False)
            before = files
