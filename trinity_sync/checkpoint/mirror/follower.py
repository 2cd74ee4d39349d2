"""Keeps a folder at the newest version of a store (`sync.store`), without Ray. Behind `trinity-sync follow`::

    current -> version-0-20-1f3a9c02        a link to a complete Hugging Face folder
    version-0-20-1f3a9c02/                  attempt, step and run
    .follow/held/actor/weights_*            the parts of a version, to which deltas are applied
    .follow/held/version.json               which one; missing while they change
    .follow/global_step_21/                 fetched files of the next version, and those being fetched in .staging/
    .follow/lock                            locked by the follower

A process that is killed leaves `current` as it was; the next one deletes or uses what is left. The network is used by a
child process only, which is ended where it moves no bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trinity_sync.checkpoint.folder import contents
from trinity_sync.checkpoint.folder.catalog import files_of
from trinity_sync.checkpoint.folder.contents import Manifest, ManifestError, read_manifest, step_dir
from trinity_sync.checkpoint.folder.owner import Owner
from trinity_sync.checkpoint.mirror.copies import DamagedError, Mirror, is_base, point_of, staged_name
from trinity_sync.checkpoint.mirror.run_mirror import DELTA_FILES, MirrorSettings, call
from trinity_sync.errors import ConfigError, RunError, TrinityError
from trinity_sync.host.durable import make_folder, replace_file, sync_folder
from trinity_sync.host.locks import open_lock, try_lock
from trinity_sync.protocol.parts import FileEntry, delta_file
from trinity_sync.protocol.versions import Version
from trinity_sync.weights.part_delta import Point, Step, VersionIndex, apply_steps, find_route

CURRENT = "current"
_OWN, _HELD, _STATE = ".follow", "held", "version.json"
_DELTA = re.compile(rf"{DELTA_FILES}/.+-from-(\d+)-(\d+)\.delta")
_VERSION = re.compile(r"version-(\d+)-(\d+)-([0-9a-f]{8})")
_NOBODY = Owner(run="", folder="", host="", session="")
_STILL_S = 120.0
"""A child process that moves no bytes for so long is ended."""
_PAUSES_S = 30.0, 3600.0
"""The first and the longest pause before a file that arrived damaged is fetched again; each is twice the one before."""


class _RunVersion(NamedTuple):
    """A version of a run; the run by the first digits of its id."""

    run: str
    point: Point

    @classmethod
    def manifest(cls, manifest: Manifest) -> _RunVersion:
        return cls(str(manifest.run)[:8], point_of(manifest))

    @property
    def folder(self) -> str:
        return "version-{}-{}-{}".format(*self.point, self.run)


class _FetchedSteps(NamedTuple):
    """What was fetched: the steps from the held version, or from the base, to the newest one."""

    version: Manifest
    steps: list[Step]
    base: Point | None


class _StoreLook(NamedTuple):
    """What a look at the store gave."""

    fetched: _FetchedSteps | None
    shown: bool  # the newest listed version, or a newer one, is shown already
    damaged: Collection[FileEntry]  # files that arrived with other bytes


class VersionFollower:
    """Keeps a folder at the newest version of a store.

    Args:
        place: the store.
        into: the folder.
        say: called with a sentence for each problem, once.
    """

    def __init__(self, place: str, into: Path, say: Callable[[str], object]) -> None:
        self._place, self._into, self._own = place, into.absolute(), into.absolute() / _OWN
        self._say = say
        self._refused: set[_RunVersion] = set()  # with the store's files, but another digest
        self._damaged: dict[FileEntry, tuple[float, float]] = {}  # the pause, and when it ends
        self._told: set[str] = set()

    def open(self) -> None:
        """Lock the folder until this process ends. Raises ConfigError."""
        try:
            if self._into.exists() and not self._own.is_dir() and any(self._into.iterdir()):
                raise ConfigError(f"--into {self._into} is not empty; name a new folder, or one of `follow`")
            make_folder(self._own)
            if not try_lock(open_lock(self._own / "lock")):
                raise ConfigError(f"--into {self._into} is in use by another `follow`; name another folder")
        except OSError as error:
            raise ConfigError(f"--into {self._into} cannot be written: {error.strerror or error}") from error

    @property
    def current(self) -> Path:
        """The link to the newest version."""
        return self._into / CURRENT

    @property
    def folder(self) -> Path:
        """The folder to which the link leads: a name that no other version gets. OSError: it cannot be read now."""
        return self._into / self.current.readlink()

    @property
    def version(self) -> Version | None:
        """The version to which the link leads; None: there is none."""
        with suppress(OSError):
            if (shown := self._shown()) is not None:
                return Version(*shown.point)
        return None

    def update(self) -> bool:
        """Take the newest version. Returns whether there was a newer one. Raises RunError: the store cannot be asked,
        has no version, or the newest cannot be made; the link leads where it led.
        """
        try:
            return self._update()
        except OSError as error:
            raise RunError(f"{error.filename or self._into}: {error.strerror or error}") from error

    def _update(self) -> bool:
        shown = self._shown()
        self._delete_others(shown)
        late = frozenset(one for one, (_, ends) in self._damaged.items() if time.monotonic() < ends)
        refused = frozenset(self._refused)
        work = partial(_fetch, root=self._own, held=self._held(), shown=shown, refused=refused, late=late)
        settings = MirrorSettings(timeout_s=_STILL_S)
        fetched, is_shown, damaged = call(self._place, settings, _NOBODY, work, say=self._tell, log=self._own / "log")
        for one in damaged:
            pause = min(2 * self._damaged[one][0], _PAUSES_S[1]) if one in self._damaged else _PAUSES_S[0]
            self._damaged[one] = pause, time.monotonic() + pause
        if fetched is None and not is_shown:
            raise RunError("no newer version can be made of what is there")
        if fetched is None:
            return False
        self._write(fetched)
        folder = _RunVersion.manifest(fetched.version).folder
        link = self._into / f".{CURRENT}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        link.replace(self.current)
        sync_folder(self._into)
        return True

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)

    def tidy(self) -> None:
        """Delete all but the current version and the parts that are held."""
        with suppress(OSError):
            self._delete_others(self._shown())
            for path in [*self._own.glob(f"*{contents.STEP_PREFIX}*"), self._own / contents.STAGING]:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, fetched: _FetchedSteps) -> None:
        """Make the newest version of what was fetched, and write its folder."""
        from trinity_sync.checkpoint.export import export_checkpoint
        from trinity_sync.checkpoint.reading import RestoredVersion
        from trinity_sync.checkpoint.reading.verl_shards import part_files
        from trinity_sync.weights.shard_file import open_shard_file

        held, of = self._own / _HELD, _RunVersion.manifest(fetched.version)
        if fetched.base is not None:
            shutil.rmtree(held, ignore_errors=True)
            step_dir(self._own, fetched.base[1]).rename(held)
        (held / _STATE).unlink(missing_ok=True)
        files = part_files(held / "actor")
        parts = [open_shard_file(file, writable=True) for file in files]
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for layout, data in parts:
                    for _ in apply_steps(layout, data, fetched.steps, self._delta_of, pool):
                        pass
            replace_file(held / _STATE, json.dumps([of.run, *of.point]))
            version = RestoredVersion(held, fetched.version, files)
            done = export_checkpoint(held, self._into / of.folder, dtype="as-saved", version=version)
        except TrinityError as error:
            if not isinstance(error.__cause__, OSError):  # else the disk refused, which says nothing of the version
                shutil.rmtree(held, ignore_errors=True)
                if fetched.base is not None:
                    self._refused.add(of)
            raise RunError(f"version {Version(*of.point)} cannot be made: {error}") from error
        if done.missing:
            self._say(f"version {Version(*of.point)} lacks {len(done.missing)} tensors that were not trained")

    def _delta_of(self, part: str, step: Step) -> Path:
        return step_dir(self._own, step[1][1]) / DELTA_FILES / delta_file(part, step[0])

    def _shown(self) -> _RunVersion | None:
        """Return the version to which the link leads; None: to none. OSError: it cannot be read now."""
        try:
            match = _VERSION.fullmatch(self.current.readlink().name)
            self.current.stat()
        except FileNotFoundError:
            return None
        return None if match is None else _RunVersion(match[3], (int(match[1]), int(match[2])))

    def _held(self) -> _RunVersion | None:
        with suppress(OSError, ValueError, TypeError):
            run, attempt, step = json.loads((self._own / _HELD / _STATE).read_text())
            return _RunVersion(str(run), (int(attempt), int(step)))
        return None

    def _delete_others(self, shown: _RunVersion | None) -> None:
        for path in self._into.glob("*version-*"):
            if _VERSION.match(path.name.removeprefix(".")) and (shown is None or path.name != shown.folder):
                shutil.rmtree(path, ignore_errors=True)  # a reader may have its files open


# ---- done in a process of its own


def _fetch(
    mirror: Mirror,
    root: Path,
    held: _RunVersion | None,
    shown: _RunVersion | None,
    refused: Collection[_RunVersion],
    late: Collection[FileEntry],
) -> _StoreLook:
    """Fetch the files with the fewest bytes that give the newest version. If one is missing or damaged, try another
    chain, then an older version. `late`: files that are not fetched now. Raises RunError: there is no version.
    """
    versions = mirror.versions()
    if not versions:
        raise RunError("there is no version yet")
    by_point = {point_of(one): one for one in versions}
    newest = _RunVersion.manifest(versions[0])
    damaged = set[FileEntry]()
    if shown is not None and shown.run == newest.run and shown.point >= newest.point:  # the store may list late
        return _StoreLook(None, True, damaged)
    start = held.point if held is not None and held.run == newest.run else None
    base_bytes = next((_base(one).bytes for one in versions if is_base(one)), 0)
    lost = set[Point | Step]()

    def index_of(at: Point) -> VersionIndex | None:
        if at not in by_point:
            return None
        full = "" if is_base(by_point[at]) and at not in lost else None
        return VersionIndex(full, [one for one in _starts(by_point[at]) if (one[0], at) not in lost])

    for version in versions:
        of = _RunVersion.manifest(version)
        if shown is not None and shown.run == of.run and of.point <= shown.point:
            break
        if of in refused:
            continue
        while (route := find_route(of.point, start, base_bytes, index_of, math.inf)) is not None:
            steps, base = route.steps(of.point), None if route.full is None else route.full[0]
            wanted: dict[Point | Step, Manifest] = {step: _deltas(by_point[step[1]], step[0]) for step in steps}
            if base is not None:
                wanted[base] = _base(by_point[base])
            away = (what for what, one in wanted.items() if not {*late, *damaged}.isdisjoint(one.files))
            failed = next(away, None) or _fetch_all(mirror, root, wanted, damaged)
            if failed is None:
                return _StoreLook(_FetchedSteps(version, steps, base), False, damaged)
            lost.add(failed)
        mirror.say(f"version {Version(*of.point)} is skipped: a base or delta that it needs is missing or damaged")
    return _StoreLook(None, False, damaged)


def _fetch_all(
    mirror: Mirror, root: Path, wanted: Mapping[Point | Step, Manifest], damaged: set[FileEntry]
) -> Point | Step | None:
    """Fetch the files of these manifests, of different steps; return the first whose files are lost or damaged. A file
    that arrived damaged is added to `damaged`.
    """
    names = {name for one in wanted.values() for name in (staged_name(one), step_dir(root, one.step).name)}
    for path in [*root.glob(f"*{contents.STEP_PREFIX}*"), *(root / contents.STAGING).glob("*")]:
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)
    for what, manifest in wanted.items():
        folder, staging = step_dir(root, manifest.step), root / contents.STAGING / staged_name(manifest)
        with suppress(ManifestError):
            if read_manifest(folder) == manifest:
                continue
        shutil.rmtree(folder, ignore_errors=True)
        if staging.is_dir() and not set(files_of(staging)) <= manifest.paths:  # of another part of the version
            shutil.rmtree(staging)
        try:
            mirror.fetch(root, manifest, keep=True)
        except DamagedError as error:
            mirror.say(f"step {manifest.step} there: {error}")
            damaged |= set() if error.arrived is None else {error.arrived}
            return what
    return None


def _base(manifest: Manifest) -> Manifest:
    files = (one for one in manifest.files if one.path.startswith((contents.WEIGHTS, "actor/huggingface/")))
    return replace(manifest, files=tuple(files))


def _deltas(manifest: Manifest, start: Point) -> Manifest:
    """Return the part of a version's files that lead to it from another version."""
    return replace(manifest, files=tuple(one for one in manifest.files if _start(one.path) == start))


def _start(path: str) -> Point | None:
    match = _DELTA.fullmatch(path)
    return None if match is None else (int(match[1]), int(match[2]))


def _starts(manifest: Manifest) -> list[tuple[Point, int]]:
    """Return the versions from which deltas lead to this one, and their bytes."""
    found = Counter[Point]()
    for one in manifest.files:
        if (start := _start(one.path)) is not None:
            found[start] += one.bytes
    return list(found.items())
