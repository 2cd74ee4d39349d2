"""Finds the checkpoint from which a run resumes, sets the folder back to it, and checks that it fits the run.

A run never resumes silently from an older checkpoint than was committed, as its record and the folder's files
(`contents`) say. A damaged checkpoint is skipped, as it stays damaged. One that is unreadable or missing now may be
there tomorrow, so the resume is refused.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.checkpoint.folder import catalog, contents, recovery
from trinity_sync.checkpoint.folder.catalog import CheckpointInfo, check_ours, newest_good, scan
from trinity_sync.checkpoint.folder.contents import Manifest, NewerFormatError, UnreadableError, step_dir, tracker_path
from trinity_sync.checkpoint.folder.deletion import unlink_notes
from trinity_sync.checkpoint.folder.recovery import recover
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.durable import sync_folder
from trinity_sync.protocol.parts import FULL, STATE_DICT, Reference
from trinity_sync.weights.lora import CONFIG_FILE, WEIGHTS_FILE, target_names, target_text
from trinity_sync.weights.shards import listed
from trinity_sync.weights.wire import WireFormat

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """The start of a verl program."""

    attempt: int  # 0 for a fresh folder, one more for each later start on it
    step: int  # 0: the initial weights
    verified: bool  # False: verl itself wrote the checkpoint, so its files have no digests


class UnseenError(RunError):
    """A committed checkpoint cannot be seen; the message names it and the place."""


def find(
    root: Path,
    *,
    skip_unreadable: bool = False,
    of_verl: bool = False,
    roles: Collection[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> CheckpointInfo | None:
    """Find the newest full checkpoint that verifies; None: there is none. Raises UnseenError, NewerFormatError.
    `roles`: places, such as ``actor``, that a checkpoint of verl's has to have.
    """
    try:
        return newest_good(root, on_skip=say, skip_unreadable=skip_unreadable, of_verl=of_verl, roles=roles)
    except UnreadableError as error:
        raise UnseenError(str(error)) from error


def look(root: Path) -> None:
    """Check as `find` does, by manifests alone and silently, before anything is written. Raises UnseenError,
    NewerFormatError: as `find`.
    """
    try:
        infos = catalog.scan(root)
    except UnreadableError as error:
        raise UnseenError(str(error)) from error
    newest = max((info.step for info in infos if info.kind == FULL), default=0)
    for info in reversed(infos):
        if info.step > newest and info.state == "newer":
            raise NewerFormatError(info.problems[0])
        if info.step > newest and info.state == "unreadable":
            raise UnseenError(info.problems[0])


def check_all_seen(
    root: Path,
    found: CheckpointInfo | None,
    recorded: Collection[int],
    *,
    places: str | None = None,
    skip_missing: bool = False,
) -> None:
    """Check that no committed checkpoint newer than `found` is missing. Raises UnseenError if nothing was found, or a
    newer checkpoint is missing.
    """
    noted = contents.read_committed(root)
    named = noted if noted is not None else contents.read_tracker(root, FULL).step
    committed = sorted({*recorded, *([named] if named else [])})
    if committed and found is None:
        raise UnseenError(
            f"{_steps(committed)} committed, but no checkpoint that verifies was found in {places or root}"
        )
    present = {info.step for info in catalog.scan(root)}
    missing = [step for step in committed if found is not None and step > found.step and step not in present]
    if missing and found is not None and not skip_missing:
        raise UnseenError(
            f"{_steps(missing)} committed, but the newest checkpoint found in {places or root} is that of step "
            f"{found.step}"
        )


def put_in_order(root: Path, resume_step: int | None, roles: Collection[str] = ()) -> StartPoint:
    """Prepare a checkpoint folder for a verl program: a fresh one, or one with checkpoints of verl or of this program.
    Raises RunError.
    """
    recovery.finish_replacements(root)
    before = catalog.newest_attempt(root)
    attempt = 0 if before is None else before + 1
    found = _newest(root, roles) if resume_step is None else _named(root, resume_step, roles)
    step = found.step if found is not None else 0
    set_start(root, step, attempt, of_verl=True)
    verified = found is None or found.manifest is not None
    if not verified:
        logger.warning("the run resumes from %s; verl wrote it, so it is not verified", step_dir(root, step))
    return StartPoint(attempt=attempt, step=step, verified=verified)


def _newest(root: Path, roles: Collection[str]) -> CheckpointInfo | None:
    try:
        found = find(root, of_verl=True, roles=roles, say=logger.warning)
        check_all_seen(root, found, ())
    except UnseenError as error:
        raise UnseenError(
            f"{error}. Nothing was changed. Start again when it can be read, or: resume_step=N resumes from an older "
            "step, resume_step=0 begins with the initial weights"
        ) from error
    if found is not None and found.manifest is None and contents.newest_finished(root) is None:
        raise RunError(
            f"{found.path} was written by verl, but no {tracker_path(root, FULL)} says whether it was finished; "
            f"resume_step={found.step} resumes from it"
        )
    absent = _absent(found.manifest, roles) if found is not None and found.manifest is not None else None
    if found is not None and absent is not None:
        raise RunError(
            f"{found.path} has no checkpoint of the role {absent}, which this program trains; resume_step={found.step} "
            "resumes from it anyway, resume_step=N from an older one"
        )
    named, step = contents.read_tracker(root, FULL).step or 0, found.step if found is not None else 0
    if named > step:
        logger.warning("%s names step %d; the newest to resume from is step %d", tracker_path(root, FULL), named, step)
    return found


def _absent(manifest: Manifest, roles: Collection[str]) -> str | None:
    """Return the first role without a file in a full checkpoint; None if all have one."""
    return next((role for role in roles if not any(path.startswith(f"{role}/") for path in manifest.paths)), None)


def _named(root: Path, step: int, roles: Collection[str]) -> CheckpointInfo | None:
    if step == 0:
        return None
    info = next((info for info in catalog.scan(root) if info.step == step), None)
    absent = catalog.missing(info.path, roles) if info is not None and info.state == "verl" else None
    if absent is not None:
        raise RunError(f"{step_dir(root, step)} was written by verl, but its {absent} is missing: it is not whole")
    if info is None or (info.kind != FULL and info.state != "verl"):
        raise RunError(f"{step_dir(root, step)} is not a committed full checkpoint, so no run can resume from it")
    return info


def _steps(steps: Collection[int]) -> str:
    newest = sorted(steps)[-5:]
    text = ", ".join(map(str, newest)) if len(newest) == len(steps) else f"..., {', '.join(map(str, newest))}"
    return f"step {text} was" if len(steps) == 1 else f"steps {text} were"


# Setting a checkpoint folder back to the step of a resume.


def check_start(root: Path, step: int, *, of_verl: bool = False) -> None:
    """Check that all later steps than that of the resume, which it sets aside, are this program's own. Raises
    RunError.
    """
    others = ("newer", "foreign", "verl") if of_verl else ("newer", "foreign")
    check_ours([info for info in scan(root) if info.step > step], others)


def set_start(root: Path, step: int, attempt: int, *, of_verl: bool = False) -> list[Path]:
    """Set a checkpoint folder back for a resume: later folders become ``abandoned-*``, trackers name `step`. Raises
    RunError: as `check_start`; nothing has been changed then. Returns the new paths of the abandoned folders.
    """
    check_start(root, step, of_verl=of_verl)
    recover(root, clock=time.time)
    unlink_notes(root, attempt)
    # Trackers first: after a crash in between they name an existing checkpoint.
    infos, gone = _set_trackers(root, step)
    while gone:  # another program has deleted it meanwhile; it looks for the trackers before it does
        infos, gone = _set_trackers(root, step)
    abandoned = []
    for info in infos:
        if info.step > step:
            before = info.attempt if info.attempt is not None or attempt == 0 else attempt - 1
            path = contents.abandoned_dir(root, info.step, before)
            info.path.rename(path)
            abandoned.append(path)
    if abandoned:
        sync_folder(root)
    return abandoned


def _set_trackers(root: Path, step: int) -> tuple[list[CheckpointInfo], bool]:
    """Set the trackers to the newest checkpoints until a step; return all, and whether one that is named is gone."""
    infos = scan(root)
    # The step of the resume may be verl's own.
    full = [info.step for info in infos if info.kind == FULL or (info.step == step and info.state == "verl")]
    if root.is_dir():
        contents.write_committed(root, max((of for of in full if of <= step), default=0))
    named = []
    for kind, steps in ((STATE_DICT, [info.step for info in infos if info.manifest is not None] + full), (FULL, full)):
        named.append(max((of for of in steps if of <= step), default=None))
        contents.write_tracker(root, kind, named[-1])
    return infos, any(of is not None and not step_dir(root, of).is_dir() for of in named)


# Checks that a run may continue from a checkpoint or an exported adapter: the same kind of weights, the same base and
# reference. They read manifests, ``adapter_config.json`` and the header of an adapter's file.


def check_kind(folder: Path, manifest: Manifest, *, lora: bool) -> None:
    """Check that a run with an adapter resumes from one, and any other run from whole weights. Raises ConfigError."""
    if lora and manifest.base is None:
        raise ConfigError(
            f"{folder} is a checkpoint of a whole model, this run trains a LoRA adapter (model.lora); leave it out, or "
            "begin a run with model.path at an export of that checkpoint"
        )
    if not lora and manifest.base is not None:
        raise ConfigError(
            f"{folder} is of a LoRA adapter on {manifest.base.path}, this run trains the whole model; set "
            "model.lora.rank, or begin a run with model.path at `trinity-sync ckpt export --merged`"
        )


def check_adapter(
    folder: Path, rank: int, alpha: float, targets: str | Collection[str] | None, *, rslora: bool = False
) -> None:
    """Check that the adapter in a full checkpoint has the rank, scale and targets of the run's adapter. Raises
    ConfigError if they differ, or are not known.
    """
    path = folder / "actor" / CONFIG_FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        found, counted, modules = int(saved["r"]), float(saved["lora_alpha"]), target_names(saved["target_modules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read, so the adapter cannot be checked: {error}") from error
    if found != rank:
        raise ConfigError(f"{folder} holds an adapter of rank {found}, this run asks for model.lora.rank={rank}")
    if counted != alpha:
        raise ConfigError(
            f"{folder} holds an adapter with alpha {counted:g}, this run asks for model.lora.alpha={alpha:g}: the same "
            "tensors would be another policy"
        )
    if (by_root := bool(saved.get("use_rslora"))) != rslora:
        raise ConfigError(
            f"{folder} holds an adapter that is scaled by {_scale(by_root)}, that of this run by {_scale(rslora)}; go "
            "on with the same model.lora.path, or without one, as the run that saved it"
        )
    if targets is not None and not _alike(modules, target_names(targets)):
        raise ConfigError(
            f"{folder} holds an adapter for {target_text(saved['target_modules'])}, this run asks for "
            f"model.lora.targets={target_text(targets)}"
        )


def _alike(saved: Collection[str], asked: Collection[str]) -> bool:
    """Return whether each name is the end of one on the other side: with vision towers, longer names are saved."""
    met = [(a, b) for a in saved for b in asked if f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")]
    return {a for a, _ in met} == set(saved) and {b for _, b in met} == set(asked)


def noted_base(folder: Path) -> contents.Base | None:
    """Return the base noted in an adapter that was exported here; None: peft saved it, without a note. Raises
    ConfigError if the file or its note cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, "np") as opened:
            note = (opened.metadata() or {}).get(contents.BASE_NOTE)
        return contents.Base.from_json(json.loads(note)) if note is not None else None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.lora.path={folder}: the base that {path} was trained on cannot be determined: {error}"
        ) from error


def check_base(folder: Path, known: contents.Base | None, base: contents.Base) -> None:
    """Check that an adapter continues on the base on which it was trained. Raises ConfigError if it is another one, or
    that cannot be told.
    """
    if known is None or known.digest == base.digest:
        return
    if known.wire is not None and known.wire != base.wire:
        raise ConfigError(
            f"{folder} knows its adapter's base by a digest of other dtypes than those of this run: go on with the "
            f"sync.wire_dtype and sync.keep_fp32 of the run that saved it ({_dtypes(known.wire)})"
        )
    raise ConfigError(
        f"{folder} was trained on a base with the digest {known.digest} (model.path={known.path}), the base of this "
        f"run has {base.digest}; an adapter continues on its own base only"
    )


def _dtypes(wire: WireFormat) -> str:
    return f"{wire.dtype}, in fp32 {listed(sorted(wire.keep_fp32)) or 'none'}"


def _scale(rslora: bool) -> str:
    return "alpha / sqrt(rank)" if rslora else "alpha / rank"


OF_ADAPTER = "base"
"""Stands for the digest if the reference is the base of the adapter, which `check_base` checks."""


def check_same(folder: Path, before: Reference | None, now: Reference | None) -> None:
    """Check that a policy keeps its reference model. A policy without one may get one, and one with a reference may
    drop it. Raises ConfigError if it is another one.
    """
    if before is None or now is None or before["digest"] == now["digest"]:
        return
    raise ConfigError(
        f"algorithm.kl.reference: {folder} was trained near {before['path']} (digest {before['digest']}), this resume "
        f"has {now['path']} (digest {now['digest']}); a run keeps its reference, a new run may "
        "begin from its checkpoint with another (checkpoint.resume_from)"
    )
