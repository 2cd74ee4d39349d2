"""The files of a checkpoint folder: names, manifest and trackers.

::

    checkpoints/
      latest_checkpointed_iteration.txt, latest_state_dict_iteration.txt     the trackers
      .committed                                                             see `read_committed`; only we write it
      global_step_20/manifest.json, global_step_20/actor/...                 a committed checkpoint
      .staging/20-0/..., .staging/20-0.json                                  a save under way, and its journal
      .pins/20-0.json, .leases/20-0-<nonce>.json, .leases/20-0-...claim      see `leases`
      .pruned/10-0, .pruned/12-0.weights                                     notes of deletions, see `deletion`
      .versions/1/global_step_20/...                                         weights of attempt 1 whose place is taken
      .deltas/0-20/...                                                       deltas to a version of a run, and its base
      abandoned-global_step_30-attempt_0/                                    later than the step of a resume
      .condemned-..., .trash-..., .replaced-...                              being deleted or replaced
      .lock, .monitor.lock                                                   see `lock`
      .run.json                                                              the mark of its run, see `owner`
      .monitor.json, .monitor.log                                            a monitor without Ray, see `daemon`
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xxhash

from trinity_sync.errors import RunError
from trinity_sync.host.durable import digest_file, replace_file, sync_folder
from trinity_sync.protocol.parts import FULL, KINDS, MANIFEST, STATE_DICT, FileEntry, Kind, Reference, Remainder, covers
from trinity_sync.weights.wire import WireFormat

FORMAT = 1
TRAINER_STATE = "trainer_state.json"
STAGING = ".staging"
PINS = ".pins"
LEASES = ".leases"
PRUNED = ".pruned"
VERSIONS = ".versions"
DELTAS = ".deltas"
WEIGHTS = "actor/weights_"
"""Begins the paths of weights that were published."""
ABANDONED_PREFIX = "abandoned-"
TRASH_PREFIX = ".trash-"
CONDEMNED_PREFIX = ".condemned-"
REPLACED_PREFIX = ".replaced-"
STEP_PREFIX = "global_step_"

_STEP_NAME = re.compile(rf"{STEP_PREFIX}(\d+)")
_ABANDONED_NAME = re.compile(rf"{ABANDONED_PREFIX}{STEP_PREFIX}\d+-attempt_(\d+)(-\d+)?")


JsonObject: TypeAlias = Mapping[str, Any]
"""An object in a file, before its values are checked."""

State = Literal["committed", "damaged", "unreadable", "newer", "foreign", "no_manifest", "verl"]
"""The state of a step folder: a checkpoint; damaged; unreadable now, maybe not later; written by a newer version of
this program; of another run; a folder without a manifest; such a folder that verl wrote.
"""

# Errors of the system for a missing or changed path: reading again would give the same.
_WRONG = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class ManifestError(RunError):
    """A folder has no valid manifest, as it is damaged; the message names the file and the fault."""

    state: State = "damaged"


class NoManifestError(ManifestError):
    """A folder has no manifest."""

    state: State = "no_manifest"


class UnreadableError(ManifestError):
    """A manifest cannot be read now, because of disk, network or permissions; it may be valid."""

    state: State = "unreadable"


class NewerFormatError(ManifestError):
    """A later version of this program wrote the manifest."""

    state: State = "newer"


def read_error(path: Path, error: OSError) -> ManifestError:
    """Return the error for a path that could not be read: damaged, or unreadable now."""
    if error.errno in _WRONG:
        return ManifestError(f"{path} cannot be read: {error.strerror}")
    return UnreadableError(f"{path} cannot be read now: {error.strerror or error}")


def file_entry(folder: Path, path: str, *, durable: bool = False) -> FileEntry:
    """Digest a file that was just written; see `digest_file`."""
    return FileEntry(path, *digest_file(folder / path, durable=durable))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``. A folder without a valid one is not a checkpoint."""

    step: int
    attempt: int
    kind: Kind
    backend: str = ""
    world_size: int = 0
    created: float = 0.0  # Unix seconds of the commit
    digest: str | None = None  # version digest of the weights, hex; None if it was not computed
    config_digest: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    # The base of an adapter, whose weights then have `digest`; None: the weights are a whole model.
    base: Base | None = None
    wire: WireFormat | None = None  # the dtypes of `digest`; None: not known
    # Tensors of the model's folder that an export takes from there; None: there are none.
    left_out: Remainder | None = None
    # The reference model of the policy; None: there is none, or it is the base of the adapter.
    reference: Reference | None = None
    run: str | None = None

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files)

    @property
    def paths(self) -> set[str]:
        return {entry.path for entry in self.files}

    def extends(self, earlier: Manifest) -> bool:
        """Return whether this only adds to an earlier checkpoint, so that its readers and pins are not affected: the
        same step and attempt, the same or a fuller kind, and all of its files unchanged.
        """
        same = (self.step, self.attempt) == (earlier.step, earlier.attempt)
        return same and covers(self.kind, earlier.kind) and set(earlier.files) <= set(self.files)

    def to_json(self) -> Mapping[str, object]:
        """Return the object in the file, with its own digest."""
        metrics = {
            name: None if value is None or not math.isfinite(value) else value for name, value in self.metrics.items()
        }
        body = {
            "format": FORMAT,
            "step": self.step,
            "attempt": self.attempt,
            "kind": self.kind,
            "backend": self.backend,
            "world_size": self.world_size,
            "created": self.created,
            "digest": self.digest,
            "config_digest": self.config_digest,
            "metrics": metrics,
            "files": [
                {"path": entry.path, "bytes": entry.bytes, "xxh3_128": entry.xxh3_128} for entry in sorted(self.files)
            ],
        }
        optional = {
            "base": self.base.to_json() if self.base is not None else None,
            "wire": self.wire.to_json() if self.wire is not None else None,
            "left_out": self.left_out,
            "reference": self.reference,
            "run": self.run,
        }
        whole = {**body, **{name: value for name, value in optional.items() if value is not None}}
        return whole | {"self": canonical_digest(whole)}

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"

    @property
    def own_digest(self) -> str:
        """The digest of the manifest itself, which identifies the checkpoint."""
        return str(self.to_json()["self"])

    @classmethod
    def from_json(cls, body: JsonObject) -> Manifest:
        """Make a manifest from the result of `to_json`. Raises ValueError, KeyError, TypeError if it is damaged, or was
        changed after it was written.
        """
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']}, which no version has written")
        rest = {key: value for key, value in body.items() if key != "self"}
        if body["self"] != canonical_digest(rest):
            raise ValueError("its own digest does not match its contents")
        if body["kind"] not in KINDS:
            raise ValueError(f"its kind is {body['kind']!r}")
        check_values(body)
        return cls(
            step=int(body["step"]),
            attempt=int(body["attempt"]),
            kind=body["kind"],
            backend=str(body["backend"]),
            world_size=int(body["world_size"]),
            created=float(body["created"]),
            digest=body["digest"],
            config_digest=body["config_digest"],
            metrics=dict(body["metrics"]),
            files=tuple(FileEntry(entry["path"], int(entry["bytes"]), entry["xxh3_128"]) for entry in body["files"]),
            base=Base.from_json(body["base"]) if "base" in body else None,
            wire=WireFormat.from_json(body["wire"]) if "wire" in body else None,
            left_out=left_out_of(body["left_out"]) if "left_out" in body else None,
            reference=reference_of(body["reference"]) if "reference" in body else None,
            run=None if body.get("run") is None else str(body["run"]),
        )


def canonical_digest(value: object) -> str:
    """Return the xxh3_128 digest, as hex, of the canonical JSON of a value: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return xxhash.xxh3_128(text.encode()).hexdigest()


KnownManifests: TypeAlias = dict[Path, tuple[str, Manifest]]
"""Manifests that this process has parsed, by folder, with the digest of their files' bytes."""


def read_manifest(folder: Path, known: KnownManifests | None = None) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Args:
        known: of earlier calls of a process that looks again and again. Each call reads the file, and only bytes that
            are the same as before are not parsed again: so a checkpoint that another process or a person has added,
            changed or deleted is seen as without it, on any file system and whatever its clock. Errors are not kept.

    Raises:
        NoManifestError: the folder has none.
        UnreadableError: it cannot be read now.
        NewerFormatError: a later version of this program wrote it.
        ManifestError: it is not valid.
    """
    path = folder / MANIFEST
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        digest = xxhash.xxh3_128_hexdigest(content)
        if known is not None and folder in known and known[folder][0] == digest:
            return known[folder][1]
        text = content.decode()
    except FileNotFoundError:
        _look_into(folder)
        raise NoManifestError(f"{folder} has no {MANIFEST}, so it is not a committed checkpoint") from None
    except OSError as error:
        raise read_error(path, error) from None
    except ValueError as error:
        raise ManifestError(f"{path} cannot be read: {error}") from None
    manifest = parse_manifest(text, path, step_of(folder.name))
    if known is not None:
        known[folder] = digest, manifest
    return manifest


def _look_into(folder: Path) -> None:
    """Raise UnreadableError if a folder in which a file was not found cannot be read now."""
    try:
        with os.scandir(folder):
            pass
    except FileNotFoundError:
        pass
    except OSError as error:
        raise read_error(folder, error) from None


def parse_manifest(text: str, name: str | Path, step: int | None) -> Manifest:
    """Parse the text of a manifest. Raises NewerFormatError, ManifestError."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name} cannot be read: {error}") from None
    version = body.get("format") if isinstance(body, dict) else None
    if type(version) is int and version > FORMAT:
        raise NewerFormatError(
            f"{name} was written by a newer version of trinity-sync: format {version}, this one reads {FORMAT}"
        )
    try:
        manifest = Manifest.from_json(body)
    except KeyError as error:
        raise ManifestError(f"{name} is not valid: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ManifestError(f"{name} is not valid: {error}") from None
    if step is not None and step != manifest.step:
        raise ManifestError(f"{name} is not valid: it is of step {manifest.step}")
    return manifest


def write_manifest(folder: Path, manifest: Manifest, *, durable: bool = True) -> None:
    """Write the manifest atomically."""
    replace_file(folder / MANIFEST, manifest.to_text(), durable=durable)


def step_dir(root: Path, step: int) -> Path:
    """Return the folder of a step's committed checkpoint."""
    return root / f"{STEP_PREFIX}{step}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a step folder; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def key_of(name: str) -> tuple[int, int] | None:
    """Return step and attempt of a name such as ``20-0``; None for any other name."""
    step, _, attempt = name.partition("-")
    return (int(step), int(attempt)) if step.isdecimal() and attempt.isdecimal() else None


def versions_dir(root: Path, attempt: int) -> Path:
    """Return the checkpoint folder for an attempt's weights whose places are taken. It is laid out as `root`, with
    leases of its own, and is deleted with its run.
    """
    return root / VERSIONS / str(attempt)


def staging_dir(root: Path, step: int, attempt: int) -> Path:
    """Return the folder into which the parts of a step are written before its commit."""
    return root / STAGING / f"{step}-{attempt}"


def partial_staging_dir(root: Path, step: int, attempt: int) -> Path:
    """Return the folder of links to staged weights that are committed while other parts are being written."""
    return root / STAGING / f"{step}-{attempt}.weights"


def journal_path(root: Path, step: int, attempt: int) -> Path:
    """Return the file with the monitor's state of a step that is being saved."""
    return root / STAGING / f"{step}-{attempt}.json"


def abandoned_dir(root: Path, step: int, attempt: int | None) -> Path:
    """Return a free name for a step folder that a resume sets aside; `attempt` made it, None: not known."""
    name = f"{ABANDONED_PREFIX}{STEP_PREFIX}{step}" + ("" if attempt is None else f"-attempt_{attempt}")
    candidate, count = root / name, 1
    while candidate.exists():
        count += 1
        candidate = root / f"{name}-{count}"
    return candidate


def abandoned_attempt(name: str) -> int | None:
    """Return the attempt in the name of an abandoned folder; None if there is none."""
    match = _ABANDONED_NAME.fullmatch(name)
    return int(match[1]) if match else None


# Atomic exchange and hard links, which not every file system has.


# Errors of `os.link` on file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders atomically; return False if the file system cannot (some network ones)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, swap = -100, 2
    if renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(second))


def link(source: Path, target: Path) -> bool:
    """Hard-link a file, and make its folder; return False if the file system cannot."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def link_or_copy(source: Path, target: Path, *, copy: bool = False) -> None:
    """Hard-link a file; copy it if that is not possible, or with `copy`."""
    if copy or not link(source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


# Notes of model folders in a manifest: the base of an adapter, untrained tensors, the reference.


_MOST = 2**63 - 1
_LAST_S = 253402300799
"""The end of the year 9999, in Unix seconds."""

BASE_NOTE = "trinity_base"
"""Key in the header of an exported adapter's file, with the manifest's note of its base as JSON."""


@dataclass(frozen=True, slots=True)
class Base:
    """The model of an adapter, which the adapter's checkpoint does not contain."""

    digest: str  # version digest of its weights in wire dtype, hex
    path: str
    what: str = "lora"  # the kind of adapter: ``lora``
    wire: WireFormat | None = None  # the dtypes of `digest`; None: not known
    # The adapter's ``adapter_config.json``; weights-only checkpoints have no such file. None: not known.
    adapter: Mapping[str, object] | None = None

    @classmethod
    def from_json(cls, body: JsonObject) -> Base:
        """Make it from a manifest's object. Raises ValueError, KeyError or TypeError if it is not valid."""
        _check_texts(body, "its base", ("digest", "path", "what"))
        if body["what"] != "lora":
            raise ValueError(f"the kind of adapter is {body['what']!r}")
        wire = WireFormat.from_json(body["wire"]) if "wire" in body else None
        adapter = body.get("adapter")
        if not (adapter is None or isinstance(adapter, dict)):
            raise ValueError(f"the adapter on its base is {adapter!r}")
        return cls(body["digest"], body["path"], body["what"], wire, adapter)

    def to_json(self) -> Mapping[str, object]:
        body = {"digest": self.digest, "path": self.path, "what": self.what}
        wire = {} if self.wire is None else {"wire": self.wire.to_json()}
        return {**body, **wire, **({} if self.adapter is None else {"adapter": dict(self.adapter)})}


def left_out_of(body: JsonObject) -> Remainder:
    """Read a manifest's note of tensors that an export takes from the model's folder. Errors as for
    `Base.from_json`.
    """
    _check_texts(body, "what its export takes from elsewhere", ("path", "digest"))
    names, tower = body["names"], body.get("tower", [])
    for some in (names, tower):
        if not isinstance(some, list) or not all(isinstance(name, str) for name in some):
            raise ValueError(f"the names of what its export takes from elsewhere are {some!r}")
    return {"path": body["path"], "names": names, "digest": body["digest"], "tower": tower}


def reference_of(body: JsonObject) -> Reference:
    """Read a manifest's note of the policy's reference model. Errors as for `Base.from_json`."""
    _check_texts(body, "its reference", ("path", "digest"))
    return {"path": body["path"], "digest": body["digest"]}


def check_values(body: JsonObject) -> None:
    """Check the ranges of a manifest's values, which may be malicious. Errors as for `Base.from_json`."""
    files = body["files"]
    _check_texts(body, "this checkpoint", ("backend",))
    odd = [(name, body[name]) for name in ("digest", "config_digest") if not isinstance(body[name], str | None)]
    odd += [(name, body[name]) for name in ("step", "attempt", "world_size") if not _is_count(body[name])]
    odd += [("created", body["created"])] if not _is_number(body["created"], _LAST_S) else []
    odd += [(f"metric {name}", one) for name, one in body["metrics"].items() if not (one is None or _is_number(one))]
    odd += [("path of a file", file["path"]) for file in files if not _is_inside(file["path"])]
    odd += [(f"size of {file['path']}", file["bytes"]) for file in files if not _is_count(file["bytes"])]
    odd += [(f"digest of {file['path']}", one) for file in files if not isinstance(one := file["xxh3_128"], str)]
    if odd:
        raise ValueError(f"its {odd[0][0]} is {odd[0][1]!r:.100}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: object, most: float = sys.float_info.max) -> bool:
    return type(value) in (int, float) and 0 <= abs(value) <= most  # type: ignore[arg-type]


def _is_inside(path: object) -> bool:
    """Return whether a relative path stays inside its folder."""
    return isinstance(path, str) and not (path.startswith("/") or "\0" in path or {"", ".."} & set(path.split("/")))


def _check_texts(body: JsonObject, what: str, keys: Iterable[str]) -> None:
    odd = next((key for key in keys if not isinstance(body[key], str)), None)
    if odd is not None:
        raise ValueError(f"the {odd} of {what} is {body[odd]!r}")


# The two tracker files, with the newest committed step. The monitor writes them after a commit.


TRACKERS: dict[Kind, str] = {
    FULL: "latest_checkpointed_iteration.txt",
    STATE_DICT: "latest_state_dict_iteration.txt",
}

COMMITTED = ".committed"


@dataclass(frozen=True, slots=True)
class TrackerFile:
    """The contents of a tracker file."""

    step: int | None  # the step; None: no file, or not valid
    problem: str | None = None
    unreadable: bool = False


def tracker_path(root: Path, kind: Kind) -> Path:
    """Return the path of the tracker of this kind."""
    return root / TRACKERS[kind]


def read_tracker(root: Path, kind: Kind) -> TrackerFile:
    """Read a tracker. An invalid one is a `TrackerFile` with a problem, not an error."""
    return _read(tracker_path(root, kind))


def read_committed(root: Path) -> int | None:
    """Return the newest step that this program has committed in full, or resumed from; 0: none so far. None: there is
    no note, so only the tracker is known.
    """
    return _read(root / COMMITTED).step


def write_committed(root: Path, step: int) -> None:
    """Write the newest step that this program has committed in full, durably and atomically."""
    replace_file(root / COMMITTED, str(step))


def newest_finished(root: Path, tracker: TrackerFile | None = None) -> int | None:
    """Return the newest step that verl or this program has finished; None: not known."""
    tracker = tracker or read_tracker(root, FULL)
    steps = [step for step in (tracker.step, read_committed(root)) if step is not None]
    return max(steps, default=None) if tracker.problem is None else None


def _read(path: Path) -> TrackerFile:
    try:
        text = path.read_bytes().decode("ascii").strip()
    except FileNotFoundError:
        return TrackerFile(None)
    except OSError as error:
        return TrackerFile(None, f"{path} cannot be read: {error}", unreadable=True)
    except UnicodeDecodeError as error:
        return TrackerFile(None, f"{path} cannot be read: {error}")
    if not text.isdecimal():
        return TrackerFile(None, f"{path} holds {text[:40]!r} instead of a step")
    return TrackerFile(int(text))


def write_tracker(root: Path, kind: Kind, step: int | None) -> None:
    """Set a tracker to a step, durably and atomically; None removes it."""
    path = tracker_path(root, kind)
    if step is not None:
        replace_file(path, str(step))
    elif path.exists():
        path.unlink()
        sync_folder(root)
