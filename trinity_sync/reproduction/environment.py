"""What differs between the places in which two attempts ran, as their records tell it, and may change sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trinity_sync.tracking.record import RunJson

NONE = "none"


class Differs(NamedTuple):
    """One thing that is not the same: what, and what it was then and is now."""

    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.what}: {self.old} -> {self.new}"


def differences(old: RunJson, new: RunJson) -> list[Differs]:
    """Compare packages, the state of the repository, threads and hardware of two records.

    What a record does not have, as those of earlier versions, is not compared.
    """
    return [
        *_mappings("", old.get("packages"), new.get("packages")),
        *_git(old, new),
        *_values("threads", old.get("threads"), new.get("threads")),
        *_mappings("", old.get("hardware"), new.get("hardware")),
    ]


def _git(old: RunJson, new: RunJson) -> Iterator[Differs]:
    before, after = old.get("git"), new.get("git")
    if before is None and after is None:
        return
    texts = [NONE if git is None else git["commit"][:12] + " with changes" * git["dirty"] for git in (before, after)]
    if texts[0] != texts[1] or texts[0].endswith("changes"):  # two sets of changes may be two different ones
        yield Differs("git", *texts)


def _mappings(prefix: str, old: object, new: object) -> Iterator[Differs]:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield Differs(f"{prefix}{name}", str(old.get(name, NONE)), str(new.get(name, NONE)))


def _values(what: str, old: object, new: object) -> Iterator[Differs]:
    if old is not None and new is not None and old != new:
        yield Differs(what, str(old), str(new))
