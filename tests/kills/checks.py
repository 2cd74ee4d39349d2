"""What has to hold of a run that was struck: nothing committed is lost, and no label stands on other weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_sync.checkpoint import catalog, verification
from trinity_sync.checkpoint.tracker_files import read_tracker
from trinity_sync.protocol.parts import FULL, STATE_DICT
from trinity_sync.tracking import jsonl


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
        published: digest by (attempt, step), from all lives.
        attempt, began: the newest attempt, and the step it began after.
    """

    keeps: int | None
    reference: dict[int, str] | None
    full: dict[int, Kept] = field(default_factory=dict)
    damaged: dict[int, int] = field(default_factory=dict)
    pinned: int | None = None
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

    def look(self, run: Path, root: Path) -> list[str]:
        """Compare the checkpoint folder and the events with what is known, and learn what is new. No process writes."""
        events = jsonl.read(run / "events.jsonl")
        attempt = self.attempt = attempts(run)[-1][0]
        found = {info.step: info for info in catalog.scan(root)}
        for step, by in list(self.damaged.items()):
            manifest = found[step].manifest if step in found else None
            if step not in found or (manifest is not None and manifest.attempt > by):
                del self.damaged[step]
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
                    problems.append(f"the full checkpoint of step {step} (attempt {was.attempt}) {there}")
            elif was.own_digest and was != is_now:
                problems.append(f"the checkpoint of step {step} is another one: it was {was}, it is {is_now}")
        self.full = full
        if self.pinned not in full:
            self.pinned = None
        for info in found.values():
            if info.step not in self.damaged:
                problems += [f"step {info.step}: {problem}" for problem in verification.verify(info.path).problems]
        problems += self._trackers(root)
        problems += self._labels(events, list(found.values()))
        return problems

    def _trackers(self, root: Path) -> Iterable[str]:
        for kind in (FULL, STATE_DICT):
            tracker = read_tracker(root, kind)
            if tracker.problem:
                yield tracker.problem
            elif tracker.step is not None and tracker.step not in self.damaged:
                there = {info.step: info.kind for info in catalog.scan(root)}.get(tracker.step)
                if there is None or (kind == FULL and there != FULL):
                    yield f"the {kind} tracker names step {tracker.step}, which is {there or 'not there'}"

    def _labels(self, events: list[dict[str, Any]], found: list[catalog.CheckpointInfo]) -> Iterable[str]:
        manifests = {info.step: info.manifest for info in found if info.manifest is not None}
        for event in events:
            if event["event"] == "publish":
                key = (event["attempt"], event["version"])
                if self.published.setdefault(key, event["digest"]) != event["digest"]:
                    yield f"version {key} was published as {self.published[key]} and as {event['digest']}"
                yield from self._compared(f"version {key}", event["version"], event["digest"])
        for event in events:
            if event["event"] == "load":
                label = self.published.get((event["attempt"], event["version"]))
                if label is not None and event["digest"] != label:
                    yield f"{event['explorer']} holds {event['digest']} as version {event['version']}, which is {label}"
                yield from self._compared(f"load of version {event['version']}", event["version"], event["digest"])
        for step, manifest in manifests.items():
            if step in self.damaged or manifest.digest is None:
                continue
            for attempt in {manifest.attempt, *({self.attempt} if step == self.began else ())}:
                label = self.published.get((attempt, step), manifest.digest)
                if manifest.digest != label:
                    yield f"the manifest of step {step} says {manifest.digest}, attempt {attempt} published {label}"
            yield from self._compared(f"the manifest of step {step}", step, manifest.digest)

    def _compared(self, what: str, step: int, digest: str) -> Iterable[str]:
        if self.reference is not None and self.reference.get(step, digest) != digest:
            yield f"{what} has the digest {digest}, the undisturbed run {self.reference[step]}"


def attempts(run: Path) -> list[tuple[int, int | None]]:
    """(attempt, the step it began after) of all attempts."""
    record = json.loads((run / "run.json").read_text())
    return [(int(one["attempt"]), one["resumed_from"]) for one in record["attempts"]]


def metrics_problems(run: Path, *, first: int = 1) -> list[str]:
    """Each step once, and in order."""
    steps = [line["step"] for line in jsonl.read(run / "metrics.jsonl")]
    if steps == list(range(first, first + len(steps))):
        return []
    twice = [step for step, count in Counter(steps).items() if count > 1]
    return [f"metrics.jsonl does not have each step once: {len(steps)} lines, last {steps[-1:]}, twice {twice[:5]}"]


def left_behind(root: Path) -> list[str]:
    """What no run that has ended leaves in its checkpoint folder."""
    patterns = (".staging/*", ".trash-*", ".replaced-*", "*.tmp", ".*.tmp", ".leases/*", ".token-*")
    return [f"{path} was left behind" for pattern in patterns for path in root.glob(pattern)]


def error_of(text: str) -> str:
    """The error that a run printed."""
    found = re.findall(r"^error: (.*)$", text, re.MULTILINE)
    return found[-1][:400] if found else ""
