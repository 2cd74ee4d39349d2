"""What has to be there: every commit, pin and lease that was promised, noted when it was promised, and compared with
what is in the folder.

The ledger sees the disk directly, beside the file operations of the program. It is asked after each operation, when no
file work is half done (`Ledger.check`), after each recovery, and at the end (`Ledger.check_tidy`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tests.campaign.filesystem import File, FileSystem, Folder
from tests.campaign.world import Violation
from trinity_sync.checkpoint.folder.contents import (
    ABANDONED_PREFIX,
    COMMITTED,
    MANIFEST,
    PINS,
    STAGING,
    STEP_PREFIX,
    TRACKERS,
    Manifest,
    ManifestError,
    parse_manifest,
    step_of,
)
from trinity_sync.checkpoint.folder.owner import MARK
from trinity_sync.protocol.parts import FULL, STATE_DICT, Kind, covers

ROOT = Path("/sim/run/checkpoints")

_ASIDE = re.compile(rf"\.(?:replaced|condemned)-(?:[0-9a-f]+-)?{STEP_PREFIX}(\d+)")
_ORDINARY = re.compile(r"\.lock|\.monitor\.lock|\.pins|\.leases|\.staging|\.versions|\.pruned")


@dataclass
class Promise:
    """A commit that was told, or seen.

    Args:
        files: path -> digest.
        durable: it has to survive a power cut.
    """

    step: int
    attempt: int
    kind: Kind
    files: dict[str, str]
    durable: bool

    def __str__(self) -> str:
        return f"the {self.kind} checkpoint of step {self.step}, attempt {self.attempt}"


@dataclass
class Found:
    """A step folder as it is."""

    folder: Folder
    manifest: Manifest


@dataclass
class Ledger:
    """What was promised.

    Args:
        disk: where it has to be.
        clock: seconds.
        keeps: the fewest newest full checkpoints that any pruner of the trial leaves.
        spares: multiples of it are never pruned; 0: no such rule.
        lineage: (attempt, step) -> the mark that every file of that step's weights and state bears.
    """

    disk: FileSystem
    clock: Callable[[], float]
    keeps: int = 1
    spares: int = 0
    lineage: dict[tuple[int, int], str] = field(default_factory=dict)
    promises: dict[int, Promise] = field(default_factory=dict)
    pins: set[tuple[int, int]] = field(default_factory=set)
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    doubtful: set[tuple[int, int]] = field(default_factory=set)
    begun: set[tuple[int, int]] = field(default_factory=set)
    superseded: set[tuple[int, int]] = field(default_factory=set)
    named: dict[Kind, int] = field(default_factory=dict)
    disordered: bool = False
    resumes: int = 0
    resuming: int = 0
    checks: int = 0
    _seen: int = -1
    _parsed: dict[tuple[int, int], Manifest | None] = field(default_factory=dict)
    _digests: dict[tuple[int, int], str] = field(default_factory=dict)

    # ---- what the world tells

    def committing(self, step: int, attempt: int, *, durable: bool) -> None:
        """The monitor begins to make a step visible, which it may not live to tell."""
        if not durable:
            self.begun.add((step, attempt))

    def committed(self, manifest: Manifest, *, durable: bool) -> None:
        """The monitor made a step visible."""
        self.begun.discard((manifest.step, manifest.attempt))
        files = {entry.path: entry.xxh3_128 for entry in manifest.files}
        known = self.promises.get(manifest.step)
        if known is not None and not covers(manifest.kind, known.kind):
            return  # what is full stays promised as full
        self.promises[manifest.step] = Promise(manifest.step, manifest.attempt, manifest.kind, files, durable)
        self.doubtful.discard((manifest.step, manifest.attempt))
        self._seen = -1

    def pinned(self, step: int) -> None:
        """`pin` has returned."""
        folder = self.disk.find(f"{ROOT}/{PINS}")
        held = [_key(name) for name in folder.names] if isinstance(folder, Folder) else []
        attempts = [key[1] for key in held if key is not None and key[0] == step]
        if not attempts:
            raise Violation(f"step {step} was pinned, but there is no pin")
        self.pins.add((step, max(attempts)))
        self._seen = -1

    def unpinning(self, step: int) -> None:
        """A pin may go from now on."""
        self.pins = {key for key in self.pins if key[0] != step}

    def leased(self, lease: Any, key: tuple[int, int]) -> None:
        """A reader holds a checkpoint."""
        self.leases[id(lease)] = key
        self._seen = -1

    def released(self, lease: Any) -> None:
        """It does no more, or cannot know."""
        self.leases.pop(id(lease), None)

    def holds(self, lease: Any) -> bool:
        """Whether a reader may rely on its lease; not where a resume has set aside what it reads."""
        return id(lease) in self.leases

    def power_was_cut(self) -> None:
        """What was not durable is promised no longer."""
        for step, promise in list(self.promises.items()):
            if not promise.durable:
                self.doubtful.add((step, promise.attempt))
                del self.promises[step]
        self.doubtful |= self.begun
        self.begun.clear()
        # A pin may have come between a commit's rename and its fsync.
        self.pins = {key for key in self.pins if key[0] in self.promises}
        self.leases.clear()
        self.named.clear()
        self.disordered = True  # trackers may be ahead of weights that were not durable, until somebody tidies up
        self._seen = -1

    def newest_full(self) -> int:
        """The step of the newest full checkpoint that is promised; 0: none is."""
        return max((step for step, promise in self.promises.items() if promise.kind == FULL), default=0)

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """Within the block a run puts the folder in order; it may be killed in it."""
        self.resumes += 1
        self.resuming += 1
        # It may be broken off at any point of what it does.
        self.named.clear()
        self._later_may_go(self.newest_full())
        try:
            yield
        finally:
            self.resuming -= 1

    def resumed(self, start: int, attempt: int) -> None:
        """An attempt goes on after a step.

        Raises:
            Violation: later full checkpoints were promised.
        """
        if start < self.newest_full():
            raise Violation(
                f"attempt {attempt} goes on after step {start}, but {self._promised(self.newest_full())} is lost"
            )
        self._later_may_go(start)
        self.named.clear()
        self.disordered = False
        self._seen = -1

    # ---- what has to hold

    def check(self, *, settled: bool = False) -> None:
        """Everything that was promised is there.

        Args:
            settled: no deletion or replacement has been broken off and waits for somebody to tidy up.

        Raises:
            Violation: it is not.
        """
        if self.disk.changes == self._seen and not settled:
            return
        self._seen = self.disk.changes
        self.checks += 1
        root = self.disk.find(str(ROOT))
        if not isinstance(root, Folder):
            return
        found = self._found(root)
        limbo = set() if settled else self._limbo(root)
        for step, promise in list(self.promises.items()):
            if step not in limbo:
                self._check_promise(promise, found)
        for step, there in found.items():
            self._check_folder(step, there)
        for key in sorted(self.pins):
            self._check_held(key, "pinned", found, limbo)
        for key in sorted(self.leases.values()):
            self._check_held(key, "leased", found, limbo)
        if not self.disordered:
            self._check_trackers(root, found, limbo)

    def check_tidy(self, attempt: int) -> None:
        """Nothing is left behind. Everybody has ended, all leases have expired and somebody pruned since."""
        root = self.disk.find(str(ROOT))
        assert isinstance(root, Folder)
        for name, node in root.names.items():
            known = step_of(name) is not None or name in (*TRACKERS.values(), COMMITTED, MARK)
            known = known or name.startswith(ABANDONED_PREFIX)
            if not known and not _ORDINARY.fullmatch(name):
                raise Violation(f"{name} was left behind")
            if name == STAGING and isinstance(node, Folder):
                for left in node.names:
                    if left != f"failed-{attempt}.json":
                        raise Violation(f"{STAGING}/{left} was left behind")
            if name in (PINS, ".leases") and isinstance(node, Folder):
                for left in node.names:
                    if left.startswith(".") or name == ".leases":
                        raise Violation(f"{name}/{left} was left behind")

    def check_idle(self) -> None:
        """The monitor has nothing to do, and its disk never failed: nothing is staged."""
        folder = self.disk.find(f"{ROOT}/{STAGING}")
        for name in folder.names if isinstance(folder, Folder) else ():
            if not name.startswith("failed-"):
                raise Violation(f"nothing is being saved, but {STAGING}/{name} is there")

    # ---- inside

    def _later_may_go(self, start: int) -> None:
        """A resume after this step sets aside what is newer."""
        # Whoever decided before to delete weights, because of newer ones that are set aside now, may do it afterwards.
        self.superseded |= {
            (step, promise.attempt)
            for step, promise in self.promises.items()
            if promise.kind == STATE_DICT and step < max(self.promises)
        }
        for step in [step for step in self.promises if step > start]:
            promise = self.promises.pop(step)
            if not promise.durable:  # and the power may be cut before it is set aside
                self.doubtful.add((step, promise.attempt))
        # Later weights are set aside with their pins; of readers, only those of the run before can hold them.
        self.pins = {key for key in self.pins if key[0] <= start}
        self.leases = {lease: key for lease, key in self.leases.items() if key[0] <= start}

    def _promised(self, step: int) -> str:
        return str(self.promises[step])

    def _found(self, root: Folder) -> dict[int, Found]:
        found = {}
        for name, node in root.names.items():
            step = step_of(name)
            if step is not None and isinstance(node, Folder) and (manifest := self._manifest(node, step)) is not None:
                found[step] = Found(node, manifest)
        return found

    def _limbo(self, root: Folder) -> set[int]:
        """Steps whose folder was put aside by somebody who died before the end; whoever comes next finishes that."""
        steps = set()
        for name, node in root.names.items():
            match = _ASIDE.match(name)
            if match and isinstance(node, Folder):
                step = int(match[1])
                if (manifest := self._manifest(node, step)) is not None and self._damage(node, manifest) is None:
                    steps.add(step)
        return steps

    def _manifest(self, folder: Folder, step: int) -> Manifest | None:
        node = folder.names.get(MANIFEST)
        if not isinstance(node, File):
            return None
        key = (node.ino, node.version)
        if key not in self._parsed:
            try:
                self._parsed[key] = parse_manifest(node.data.decode("utf-8", "replace"), MANIFEST, None)
            except ManifestError:
                self._parsed[key] = None
        manifest = self._parsed[key]
        return manifest if manifest is not None and manifest.step == step else None

    def _digest(self, node: File) -> str:
        key = (node.ino, node.version)
        if key not in self._digests:
            self._digests[key] = xxhash.xxh3_128(node.data).hexdigest()
        return self._digests[key]

    def _damage(self, folder: Folder, manifest: Manifest) -> str | None:
        for entry in manifest.files:
            node = _below(folder, entry.path)
            if not isinstance(node, File):
                return f"{entry.path} is missing"
            if self._digest(node) != entry.xxh3_128:
                return f"{entry.path} holds {node.data[:60]!r}, which is not what was committed"
        return None

    def _check_promise(self, promise: Promise, found: Mapping[int, Found]) -> None:
        there = found.get(promise.step)
        if there is None:
            if not self._may_go(promise, found):
                pinned = " though it is pinned" if (promise.step, promise.attempt) in self.pins else ""
                raise Violation(f"{promise} is lost{pinned}")
            del self.promises[promise.step]
            return
        manifest = there.manifest
        if not covers(manifest.kind, promise.kind):
            raise Violation(f"{promise} was replaced by less: {manifest.kind} of attempt {manifest.attempt}")
        files = {entry.path: entry.xxh3_128 for entry in manifest.files}
        for path, digest in promise.files.items():
            if manifest.attempt == promise.attempt and files.get(path) != digest:
                raise Violation(f"{promise}: {path} has become {'another file' if path in files else 'missing'}")
            if path not in files and promise.kind == FULL:
                raise Violation(f"{promise}: {path} is gone in the commit of attempt {manifest.attempt}")

    def _may_go(self, promise: Promise, found: Mapping[int, Found]) -> bool:
        if (promise.step, promise.attempt) in self.pins:
            return False
        steps = {step for step, there in found.items() if there.manifest.kind == FULL}
        if promise.kind == STATE_DICT:
            superseded = (promise.step, promise.attempt) in self.superseded
            return superseded or any(step > promise.step for step in found)
        newer = sum(step > promise.step for step in steps)
        return newer >= self.keeps and not (self.spares and promise.step % self.spares == 0)

    def _check_folder(self, step: int, there: Found) -> None:
        manifest = there.manifest
        if (step, manifest.attempt) in self.doubtful:
            return
        damage = self._damage(there.folder, manifest)
        if damage is not None:
            raise Violation(
                f"the {manifest.kind} checkpoint of step {step}, attempt {manifest.attempt}, is damaged: {damage}"
            )
        mark = self.lineage.get((manifest.attempt, step))
        for entry in manifest.files:
            node = _below(there.folder, entry.path)
            assert isinstance(node, File)
            if mark is not None and f"|{mark}|".encode() not in node.data:
                raise Violation(
                    f"step {step}, attempt {manifest.attempt}, is {mark}, but {entry.path} holds {node.data[:60]!r}"
                )
        if step not in self.promises:
            files = {entry.path: entry.xxh3_128 for entry in manifest.files}
            self.promises[step] = Promise(step, manifest.attempt, manifest.kind, files, durable=False)

    def _check_held(self, key: tuple[int, int], how: str, found: Mapping[int, Found], limbo: set[int]) -> None:
        step, attempt = key
        there = found.get(step)
        if there is None and step not in limbo:
            raise Violation(f"the {how} checkpoint of step {step}, attempt {attempt}, is gone")
        if there is not None and there.manifest.attempt != attempt:
            raise Violation(
                f"the {how} checkpoint of step {step}, attempt {attempt}, was replaced by one of attempt "
                f"{there.manifest.attempt}"
            )

    def _check_trackers(self, root: Folder, found: Mapping[int, Found], limbo: set[int]) -> None:
        for kind, name in TRACKERS.items():
            node = root.names.get(name)
            if not isinstance(node, File):
                continue
            text = node.data.decode("ascii", "replace")
            if not text.isdecimal():
                raise Violation(f"the tracker {name} holds {text!r}")
            step = int(text)
            if step in limbo:
                continue
            there = found.get(step)
            if there is None or not covers(there.manifest.kind, kind):
                raise Violation(
                    f"the tracker {name} names step {step}, which is {'no ' + kind if there else 'not there'}"
                )
            if step < self.named.get(kind, 0):
                raise Violation(
                    f"the tracker {name} went back from step {self.named[kind]} to {step} within an attempt"
                )
            self.named[kind] = step


def _below(folder: Folder, path: str) -> File | Folder | None:
    node: File | Folder | None = folder
    for name in path.split("/"):
        node = node.names.get(name) if isinstance(node, Folder) else None
    return node


def _key(name: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)-(\d+)\.json", name)
    return (int(match[1]), int(match[2])) if match else None
