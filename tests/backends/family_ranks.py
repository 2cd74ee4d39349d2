"""What each rank of `test_families.py` runs: a tiny model of each family on verl's own engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.backends.engines import Lazy, _digest, _engine, _facts_file, _step, join_group, refused, staged
from tests.families import EAGER, architecture


def rank_of_families(
    rank: int, ranks: int, port: int, folder: Path, cases: list[Mapping[str, Any]], saved: Mapping[str, Any]
) -> None:
    """Go through the cases, each with `family` and `strategy`."""
    import warnings

    warnings.simplefilter("ignore")
    import torch.distributed as dist
    import verl  # noqa: F401 - loads the platform

    join_group(port, rank, ranks)
    facts = []
    for number, case in enumerate(cases):
        facts.append(_examine(case, folder / f"case-{number}", rank, ranks))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / f"case-{number}")
    _facts_file(folder, ranks, rank).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def _examine(case: Mapping[str, Any], folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Digests of the first version and of one after training, wherever they are."""
    import torch.distributed as dist

    from trinity_sync.backends.fsdp import FsdpBackend
    from trinity_sync.checkpoint.reading import open_weights
    from trinity_sync.models.architecture import make_model
    from trinity_sync.weights.wire import WireFormat

    family, model = case["family"], folder / "model"
    if rank == 0:
        make_model(architecture(family), 0, model)
    dist.barrier()
    engine = _engine(str(model), case["strategy"], -1, attention="eager" if family in EAGER else "sdpa")
    backend = FsdpBackend(engine, "BF16")
    wire = WireFormat.seen("BF16", {name: tensor.dtype for name, tensor in backend.saved().items()})
    facts: dict[str, Any] = {"fp32": sorted(wire.keep_fp32), "refused": refused(backend, case["strategy"], ranks)}
    facts["file"] = open_weights(model).digest(wire)
    facts["initial"] = _digest(backend, ranks)
    # the learning rate warms up from 0, so the first step changes nothing
    _step(engine, rank, 0)
    _step(engine, rank, 1)
    facts["trained"] = _digest(backend, ranks)
    facts["held"] = _held(staged(backend, ranks), model, family, wire)
    Lazy(backend, backend.state("verl")).write(folder / "saved" / "actor")
    if rank == 0:
        backend.write_metadata(folder / "saved" / "actor")
    dist.barrier()
    facts["exported"] = open_weights(folder / "saved").digest(wire)
    return facts


def _held(parts: list[tuple[Any, bytes]], model: Path, family: str, wire: Any) -> list[str]:
    """Digests of what an explorer's model holds that took what all ranks staged: of what it took, and of all it has."""
    from tests.explorer.helpers import engine_of
    from trinity_sync.weights.apply import Receiver
    from trinity_sync.weights.digests import bucket_digests, version_digest

    explorer = engine_of(model, dtype="bf16", attn_implementation="eager" if family in EAGER else "sdpa")
    receiver = Receiver(explorer.destinations())
    receiver.check([layout for layout, _ in parts])
    receiver.begin()
    for layout, segment in parts:
        receiver.apply(layout, segment, bucket_digests(segment, layout))
    return [version_digest(receiver.taken()), receiver.digest(wire)]
