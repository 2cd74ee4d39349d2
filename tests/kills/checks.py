"""What has to hold of a run that was struck: nothing committed is lost, and no label stands on other weights."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kills.trial import LABEL, LEFT, LOSS, TAKEN
from trinity_sync.checkpoint.folder import catalog
from trinity_sync.checkpoint.folder.contents import STEP_PREFIX, read_tracker
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.tracking import json_lines


@dataclass(frozen=True)
class Kept:
    """A committed full checkpoint, as it was seen: its manifest's digest of itself stands for every file."""

    step: int
    attempt: int
    own_digest: str


@dataclass
class Ledger:
    """What a chain's run has committed so far, life after life.

    Attributes:
        keeps: how many of the newest full checkpoints the retention leaves at least; None: all.
        reference: version digests by step of a run that nothing befell; None where there is no such thing.
        full: committed full checkpoints that are not known to have been let go.
        damaged: steps that were damaged on purpose, and the attempt that had saved them.
        pinned: a step that is pinned.
        tracker_damaged: the newest attempt when the tracker was damaged on purpose; a later one that commits has
            repaired it.
        published: digest by (attempt, step), from all lives.
        attempt, began: the newest attempt, and the step it began after.
    """

    keeps: int | None
    reference: dict[int, str] | None
    full: dict[int, Kept] = field(default_factory=dict)
    damaged: dict[int, int] = field(default_factory=dict)
    pinned: int | None = None
    tracker_damaged: int | None = None
    published: dict[tuple[int, int], str] = field(default_factory=dict)
    began: int = 0
    attempt: int = 0

    @property
    def good(self) -> list[int]:
        """Steps that a resume can begin with, oldest first."""
        return sorted(set(self.full) - set(self.damaged))

    @property
    def nothing_left(self) -> bool:
        """All that was saved is damaged: a resume has to refuse."""
        return bool(self.damaged) and not self.good

    def damage(self, step: int) -> None:
        """A checkpoint was damaged on purpose."""
        self.damaged[step] = self.full[step].attempt

    def fetched(self, kept: Kept) -> None:
        """The checkpoint folder was lost, and the next resume gets this one from the mirror."""
        self.full, self.damaged, self.pinned = {kept.step: kept}, {}, None

    def look(self, run: Path, root: Path) -> list[str]:
        """Compare the checkpoint folder and the events with what is known, and learn what is new. No process writes."""
        events = json_lines.read(run / "events.jsonl")
        since = math.inf if self.tracker_damaged is None else self.tracker_damaged
        attempt = self.attempt = attempts(run)[-1][0]
        found = {info.step: info for info in catalog.scan(root)}
        for step, by in list(self.damaged.items()):
            manifest = found[step].manifest if step in found else None
            # Saved again, or fetched from the mirror.
            if step not in found or (manifest is not None and (manifest.attempt > by or _is_whole(found[step]))):
                del self.damaged[step]
        if any(event["attempt"] > since and event["event"] == "commit" for event in events):
            self.tracker_damaged = None
        full = {
            step: Kept(step, info.manifest.attempt, info.manifest.own_digest)
            for step, info in found.items()
            if info.manifest is not None and info.kind == FULL
        }
        now = [event for event in events if event["attempt"] == attempt]
        for event in now:
            if event["event"] == "commit" and event["kind"] == FULL:
                self.full.setdefault(event["step"], Kept(event["step"], attempt, ""))
        problems: list[str] = []
        for step, was in sorted(self.full.items()):
            if step in self.damaged or (step > self.began and was.attempt < attempt):
                continue  # or abandoned by the resume, which began before it
            is_now = full.get(step)
            if is_now is None:
                # Events are not asked: what a full one was replaced by may have been pruned rightly.
                may_go = self.keeps is not None and sum(other > step for other in full) >= self.keeps
                if not may_go or step == self.pinned:
                    there = f"is a {found[step].kind}" if step in found and found[step].kind else "is gone"
                    problems.append(f"{LOSS}: the full checkpoint of step {step} (attempt {was.attempt}) {there}")
            elif was.own_digest and was != is_now:
                problems.append(f"{LOSS}: the checkpoint of step {step} is another one: it was {was}, it is {is_now}")
        self.full = full
        if self.pinned not in full:
            self.pinned = None
        for info in found.values():
            if info.step not in self.damaged:
                problems += [f"{LOSS}: step {info.step}: {problem}" for problem in catalog.verify(info.path).problems]
        problems += self._trackers(root)
        problems += self._labels(events, list(found.values()))
        return problems

    def _trackers(self, root: Path) -> Iterable[str]:
        for kind in (FULL, STATE_DICT):
            if kind == FULL and self.tracker_damaged is not None:
                continue
            tracker = read_tracker(root, kind)
            if tracker.problem:
                yield f"{LABEL}: {tracker.problem}"
            elif tracker.step is not None and tracker.step not in self.damaged:
                there = {info.step: info.kind for info in catalog.scan(root)}.get(tracker.step)
                if there is None or (kind == FULL and there != FULL):
                    yield f"{LABEL}: the {kind} tracker names step {tracker.step}, which is {there or 'not there'}"

    def _labels(self, events: list[dict[str, Any]], found: list[catalog.CheckpointInfo]) -> Iterable[str]:
        manifests = {info.step: info.manifest for info in found if info.manifest is not None}
        for event in events:
            if event["event"] == "publish":
                key = (event["attempt"], event["version"])
                if self.published.setdefault(key, event["digest"]) != event["digest"]:
                    yield f"{LABEL}: version {key} was published as {self.published[key]} and as {event['digest']}"
                yield from self._compared(f"version {key}", event["version"], event["digest"])
        for event in events:
            if event["event"] == "load":
                label = self.published.get((event["attempt"], event["version"]))
                if label is not None and event["digest"] != label:
                    yield (
                        f"{LABEL}: {event['explorer']} holds {event['digest']} as version {event['version']}, "
                        f"which is {label}"
                    )
                yield from self._compared(f"load of version {event['version']}", event["version"], event["digest"])
        for step, manifest in manifests.items():
            if step in self.damaged or manifest.digest is None:
                continue
            for attempt in {manifest.attempt, *({self.attempt} if step == self.began else ())}:
                label = self.published.get((attempt, step), manifest.digest)
                if manifest.digest != label:
                    says = f"the manifest of step {step} says {manifest.digest}"
                    yield f"{LABEL}: {says}, attempt {attempt} published {label}"
            yield from self._compared(f"the manifest of step {step}", step, manifest.digest)

    def _compared(self, what: str, step: int, digest: str) -> Iterable[str]:
        if self.reference is not None and self.reference.get(step, digest) != digest:
            yield f"{LABEL}: {what} has the digest {digest}, the undisturbed run {self.reference[step]}"


@dataclass
class Owner:
    """Whose bytes lie in the places of a chain's run: its run id, and what it has committed and published.

    Attributes:
        foreign: version digests of other runs.
        run_id: as its first record has it.
    """

    foreign: frozenset[str] = frozenset()
    run_id: str = ""

    def look(self, run: Path, places: Iterable[Path], published: dict[tuple[int, int], str]) -> Iterable[str]:
        """Compare each manifest in the places with the run. No process writes."""
        run_id = json.loads((run / "run.json").read_text()).get("id", "")
        self.run_id = self.run_id or run_id
        if not run_id or run_id != self.run_id:
            yield f"{LABEL}: run.json has the run id {run_id!r}, it was {self.run_id!r}"
            return
        for place in places:
            manifests = sorted(place.glob("*/manifest*.json"))
            for path in manifests:
                yield from self._manifest(path, published)
            marks = {path: json.loads(path.read_text())["run"] for path in place.glob(".run*.json")}
            for path, run_id in marks.items():
                if run_id != self.run_id:
                    yield f"{TAKEN}: {path} is the mark of the run {run_id!r}, the run is {self.run_id!r}"
            if manifests and not marks:
                yield f"{LABEL}: {place} has checkpoints and no mark of a run"

    def _manifest(self, path: Path, published: dict[tuple[int, int], str]) -> Iterable[str]:
        try:
            manifest = json.loads(path.read_text())
            key = manifest["attempt"], manifest["step"]
        except (ValueError, KeyError, TypeError, OSError):
            return  # that was damaged on purpose, or `verify` says so
        if manifest.get("run") != self.run_id:
            yield f"{TAKEN}: {path} has the run id {manifest.get('run')!r}, the run has {self.run_id!r}"
        digest = manifest.get("digest")
        if digest in self.foreign:
            yield f"{TAKEN}: {path} has the digest {digest} of another run"
        elif digest is not None and published.get(key, digest) != digest:
            yield f"{LABEL}: {path} has the digest {digest}, attempt {key[0]} published {published[key]}"
        if path.parent.name.startswith(STEP_PREFIX) and path.parent.name != f"{STEP_PREFIX}{key[1]}":
            yield f"{LABEL}: {path} says step {key[1]}"


def whole_in(mirror: Path) -> dict[int, Kept]:
    """The checkpoints at a mirror that a resume can fetch, by step."""
    return {
        info.step: Kept(info.step, info.manifest.attempt, info.manifest.own_digest)
        for info in catalog.scan(mirror)
        if info.manifest is not None and _is_whole(info)
    }


def _is_whole(info: catalog.CheckpointInfo) -> bool:
    return catalog.verify(info.path).ok


def mirror_problems(mirror: Path) -> Iterable[str]:
    """Look at a mirror to which no process writes: each checkpoint there is whole, and the tracker names one."""
    for info in catalog.scan(mirror):
        if info.manifest is not None:
            yield from (f"{LOSS}: {info.path}: {problem}" for problem in catalog.verify(info.path).problems)
    known = ("global_step_*", "latest_*_iteration.txt", ".*")
    for path in mirror.iterdir() if mirror.exists() else ():
        if not any(path.match(pattern) for pattern in known):
            yield f"{LEFT}: {path}"
    for pattern in (".probe*", "*.tmp", ".*.tmp"):
        yield from (f"{LEFT}: {path}" for path in mirror.glob(pattern))


def signal_problems(run: Path, recorded_before: int, newest: int, *, saves: bool) -> Iterable[str]:
    """Look at a run that a signal has ended.

    Args:
        recorded_before: number of its attempts before this start.
        newest: step of its newest full checkpoint.
        saves: the step under way was to be saved.
    """
    if not (run / "run.json").exists() or len(attempts(run)) <= recorded_before:
        return  # it had not begun
    status = json.loads((run / "run.json").read_text())["status"]
    if status != "interrupted":
        yield f"{LABEL}: the status of the run is {status} instead of interrupted"
    trained = max((line["step"] for line in json_lines.read(run / "metrics.jsonl")), default=0)
    if saves and newest != trained:
        yield f"{LOSS}: the signal came in step {trained}, and the newest checkpoint is that of step {newest}"


def attempts(run: Path) -> list[tuple[int, int | None]]:
    """(attempt, the step it began after) of all attempts."""
    record = json.loads((run / "run.json").read_text())
    return [(int(one["attempt"]), one["resumed_from"]) for one in record["attempts"]]


def metrics_problems(run: Path, *, first: int = 1) -> list[str]:
    """Each step once, and in order."""
    steps = [line["step"] for line in json_lines.read(run / "metrics.jsonl")]
    if steps == list(range(first, first + len(steps))):
        return []
    twice = [step for step, count in Counter(steps).items() if count > 1]
    return [
        f"{LABEL}: metrics.jsonl does not have each step once: {len(steps)} lines, last {steps[-1:]}, twice {twice[:5]}"
    ]


def left_behind(root: Path, *, copier_died: bool = False) -> list[str]:
    """What no run that has ended leaves in its checkpoint folder.

    Args:
        copier_died: a process that copied to the mirror was killed. Its lease expires after 90 s and is deleted later.
    """
    leases = "" if copier_died else ".leases/*"
    patterns = (".staging/*", ".trash-*", ".replaced-*", "*.tmp", ".*.tmp", leases, ".token-*")
    return [f"{LEFT}: {path}" for pattern in filter(None, patterns) for path in root.glob(pattern)]


def error_of(text: str) -> str:
    """The error that a run printed."""
    found = re.findall(r"^error: (.*)$", text, re.MULTILINE)
    return found[-1][:400] if found else ""
