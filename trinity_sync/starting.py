"""Where a run begins: at its first step, where it was, or where another one was. Decided before anything is started."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trinity_sync.backends.megatron.resume import check_layout
from trinity_sync.checkpoint import store
from trinity_sync.checkpoint.layout import MANIFEST, ManifestError, read_manifest, step_of
from trinity_sync.errors import ConfigError
from trinity_sync.mirroring import RunMirror

_SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")


@dataclass(frozen=True)
class Start:
    """After which step a run begins, and from what.

    Attributes:
        step: 0 for a fresh one.
        resumed: it goes on in its own folder.
        checkpoints: where it saves.
        folder: the checkpoint that it begins with; None: the initial model.
        weights_only: it takes the checkpoint's weights, and begins with a new optimizer.
    """

    step: int
    resumed: bool
    checkpoints: Path
    folder: Path | None
    weights_only: bool = False

    def taken_weights(self, model_folder: Path) -> Path:
        """Where the weights of another engine's checkpoint lie while the run starts, in Hugging Face format."""
        return model_folder.with_name(f"model-of-step-{self.step}")

    @classmethod
    def find(cls, cfg: DictConfig, checkpoints: Path, *, resume: bool, logs: Path | None = None) -> Start:
        """Look for it.

        Args:
            cfg: composed and checked.
            checkpoints: the run's checkpoint folder.
            resume: go on from the newest checkpoint in it, or at the mirror, that verifies.
            logs: of the run.

        Raises:
            ConfigError: there is nothing to go on with or too much, or the run's engine cannot load it; or the mirror
                cannot be used for a new run.
            RunError: nothing here verifies, and the mirror cannot be reached.
        """
        mirror = RunMirror.of(cfg, logs)
        if resume:
            return cls._resumed(cfg, checkpoints, mirror)
        if store.scan(checkpoints):
            raise ConfigError(
                f"checkpoint.dir={checkpoints} holds checkpoints of another run already; name another folder, "
                f"or go on with that run: trinity-sync resume RUN_DIR"
            )
        folder = Path(cfg.checkpoint.resume_from) if cfg.checkpoint.resume_from is not None else None
        step, whole = _check_given(cfg, folder) if folder is not None else (0, True)
        if mirror is not None:
            mirror.check(checkpoints)
        return cls(step, False, checkpoints, folder, weights_only=not whole)

    @classmethod
    def _resumed(cls, cfg: DictConfig, checkpoints: Path, mirror: RunMirror | None) -> Start:
        found = store.newest_good(checkpoints, kind="full", on_skip=lambda text: print(text, file=sys.stderr))
        if mirror is not None and mirror.fetch_newer(checkpoints, found) is not None:
            found = store.newest_good(checkpoints, kind="full")
        if found is None:
            where = f"{checkpoints} or at {mirror.name}" if mirror is not None else str(checkpoints)
            print(f"no checkpoint in {where} verifies yet: the run begins again at step 1", file=sys.stderr)
            return cls(0, True, checkpoints, None)
        _check_steps(cfg, found.step, f"the run with checkpoints in {checkpoints}")
        assert found.manifest is not None, "a checkpoint that verifies has a manifest"
        whole = _check_engine(cfg, found.path, found.manifest.backend, found.manifest.world_size)
        return cls(found.step, True, checkpoints, found.path, weights_only=not whole)


def _check_given(cfg: DictConfig, folder: Path) -> tuple[int, bool]:
    """Of a checkpoint that the user named (ours, verl's or Trinity's), `checkpoint.resume_from`: its step, and whether
    the run's engine can load all of it.
    """
    key = "checkpoint.resume_from"
    step = step_of(folder.resolve().name)
    if not folder.is_dir() or step is None:
        raise ConfigError(f"{key}={folder} is no step folder; name one such as RUN/checkpoints/global_step_20")
    if (folder / MANIFEST).exists():
        report = store.verify(folder)
        if not report.ok:
            raise ConfigError(f"{key}: {report.problems[0]}")
        try:
            manifest = read_manifest(folder)
        except ManifestError as error:
            raise ConfigError(f"{key}: {error}") from error
        if manifest.kind != "full":
            raise ConfigError(f"{key}={folder} holds weights only; a run can go on with a full checkpoint")
        backend, world_size = manifest.backend, manifest.world_size
    else:
        backend, world_size = _recognise(folder, key)
    _check_steps(cfg, step, f"{key}={folder}")
    return step, _check_engine(cfg, folder, backend, world_size)


def _recognise(folder: Path, key: str) -> tuple[str, int]:
    """Engine and ranks of a checkpoint without a manifest, as verl and Trinity write them."""
    shards = [match for path in sorted((folder / "actor").glob("*.pt")) if (match := _SHARD.fullmatch(path.name))]
    if not shards:
        raise ConfigError(f"{key}={folder} has neither {MANIFEST} nor verl's FSDP shards below actor/")
    world_size = int(shards[0].group(1))
    wanted = [
        f"{name}_world_size_{world_size}_rank_{rank}.pt"
        for name in ("model", "optim", "extra_state")
        for rank in range(world_size)
    ]
    missing = [name for name in wanted if not (folder / "actor" / name).exists()]
    if missing:
        raise ConfigError(f"{key}={folder} is not whole: actor/{missing[0]} is missing")
    try:
        version = int(json.loads((folder / "actor" / "fsdp_config.json").read_text())["FSDP_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}={folder}: actor/fsdp_config.json cannot be read: {error}") from error
    return ("fsdp" if version == 1 else f"fsdp{version}"), world_size


def _check_steps(cfg: DictConfig, step: int, what: str) -> None:
    if step >= cfg.trainer.steps:
        raise ConfigError(
            f"{what} has reached step {step} of trainer.steps={cfg.trainer.steps}: "
            f"to go on, give more, such as trainer.steps={step * 2}"
        )


def _check_engine(cfg: DictConfig, path: Path, backend: str, world_size: int) -> bool:
    """Whether the run's engine can load all that another one saved; else it can take the weights."""
    wanted = (cfg.backend.strategy, cfg.backend.ranks)
    if backend == wanted[0] == "megatron":
        if note := check_layout(cfg, path):
            print(f"note: {note}", file=sys.stderr)
        return True
    if (backend, world_size) == wanted:
        return True
    if "megatron" in (backend, wanted[0]):
        print(
            f"note: {path} was saved by backend={backend}, this run goes on with backend={wanted[0]}: with the same "
            f"weights and at the same place in the learning-rate schedule, but the optimizer's averages begin anew",
            file=sys.stderr,
        )
        return False
    if (path / "actor" / "dcp").is_dir() and {backend, wanted[0]} <= {"fsdp", "fsdp2"}:
        if world_size != wanted[1]:
            print(
                f"note: {path} was saved by {world_size} trainer ranks; weights and optimizer are the same on "
                f"{wanted[1]}, the random numbers of a rank are not",
                file=sys.stderr,
            )
        return True
    raise ConfigError(
        f"{path} was saved by backend={backend} on backend.ranks={world_size}, this run asks for "
        f"backend={wanted[0]} on backend.ranks={wanted[1]}; verl's shard files need the same engine and ranks "
        f"(a run with checkpoint.format=dcp can be resumed on others)"
    )
