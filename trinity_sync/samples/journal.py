"""The journal of a run's samples: finished groups are written before they are trained on, so that a run that goes on
from a checkpoint trains on them again and generates only what is missing (`samples.journal`).

A folder of files, each of records in the order in which they were written. A record is a header (magic, kind, bytes,
xxh3_128 of the rest), then JSON, then arrays. A file ends at its first damaged record: the run may have died there.

- In lockstep a record holds the samples of one explorer's call, and the digest of the version that made them: they are
  used again only for the same prompts and the same weights.
- In a free run a further record lists the groups that a step took. A run that goes on takes the same, step by step, so
  that it comes to the same weights, and after them the groups that were finished and not taken.

Written and read by the driver. A file is deleted once a checkpoint is committed that needs none of its samples.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from trinity_sync.samples.batch import SampleBatch, TokenRows, VersionSpans
from trinity_sync.samples.position import GroupId

_FORMAT = 1
_HEADER = struct.Struct("<4s4sQ16s")  # magic, kind, bytes after the header, their digest
_MAGIC = b"TSJ1"
_LENGTH = struct.Struct("<I")
_HANGS_S = 30.0
"""Time after which a write of another thread counts as one that hangs."""

_Kind = Literal[b"head", b"made", b"took", b"kept"]


class UpdateGroupIds(NamedTuple):
    """The groups that a step of a free run took; see `queue.UpdateGroups`."""

    groups: Sequence[GroupId]
    filled: Sequence[GroupId] = ()
    left_out: Sequence[GroupId] = ()

    def all(self) -> Iterator[GroupId]:
        """Yield the groups of all three."""
        for groups in self:
            yield from groups


class FinishedGroup(NamedTuple):
    """A finished group of a free run: rows of a batch, the step of its oldest version, and whether it is flat."""

    batch: SampleBatch
    rows: NDArray[np.int64]
    version_step: int
    flat: bool


@dataclass
class _File:
    """A file of the journal. `groups`: those whose newest record is in it. `last_step`: the last step that it is for in
    lockstep, or that took groups by a record of it.
    """

    path: Path
    nbytes: int = 0
    groups: set[GroupId] = field(default_factory=set)
    last_step: int = 0
    lockstep: bool = False


class _RecordPlace(NamedTuple):
    """The place of a record."""

    file: _File
    offset: int
    nbytes: int


class _RecordSamples(NamedTuple):
    """The samples of one record. `prompts`: their groups, ascending. `versions`: the steps of the oldest and of the
    newest version of each.
    """

    place: _RecordPlace
    digest: str | None
    prompts: Sequence[GroupId]
    versions: Sequence[tuple[int, int]]
    flat: frozenset[GroupId]


class Journal:
    """The journal of one attempt, with those of earlier attempts of the run. Any thread.

    Args:
        folder: of the run; made when there is something to write.
        run: name of the run; files of another run are not used.
        made_with: digest of all settings and code that samples depend on; files with another are not used.
        attempt: of the run.
        most_bytes: size of all files from which on nothing more is written, until a checkpoint is committed.
        fault: is told what cannot be read or written: the run goes on without it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        made_with: str,
        attempt: int,
        most_bytes: int,
        fault: Callable[[str, str], None],
    ) -> None:
        self._folder, self._attempt, self._most_bytes, self._fault = folder, attempt, most_bytes, fault
        self._head = {"format": _FORMAT, "run": run, "made_with": made_with}
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._open: BinaryIO | None = None
        self._number = 0
        self._stopped = False
        self._ended = False
        self._hangs = False
        self._told: set[str] = set()
        self._repeated_to: int | None = None  # the last step that an attempt repeated which took no other one
        self._made: dict[tuple[GroupId, ...], _RecordSamples] = {}
        self._of_group: dict[GroupId, _RecordSamples] = {}
        self._took: dict[int, UpdateGroupIds] = {}
        self._read()

    # -- both schedules

    def append(self, batch: SampleBatch, digest: str | None = None, flat: Collection[GroupId] = ()) -> None:
        """Write samples of whole groups. `digest`: of the version that made all of them."""
        firsts, group = batch.groups()
        prompts = [GroupId(int(batch.steps[row]), int(batch.prompts[row])) for row in firsts]
        spans = batch.spans
        oldest, newest = spans.oldest, np.maximum.reduceat(spans.rows[:, 2], spans.offsets[:-1])
        of_group = [group == number for number in range(len(prompts))]
        versions = [(int(oldest[rows].min()), int(newest[rows].max())) for rows in of_group]
        head = {"digest": digest, "prompts": prompts, "versions": versions, "flat": [*flat]}
        columns = _columns(batch)
        with self._held() as held:
            place = self._write(b"made", head, columns) if held else None
            if place is not None:
                self._note_made(_RecordSamples(place, digest, prompts, versions, frozenset(flat)))
            elif held:  # a run that goes on must not use their older samples
                for one in prompts:
                    self._drop(one)

    def cut(self, step: int) -> None:
        """Delete the files that no run needs which goes on from the checkpoint of a step."""
        with self._held() as held:
            if not held:
                return
            self._close()
            self._stopped = False
            for taken in [one for one in self._took if one <= step]:
                for group in self._took.pop(taken).all():
                    self._drop(group)
            # in their order: a later file may say that steps of an earlier one are void
            while self._files and self._files[0].last_step <= step and not self._files[0].groups:
                self._forget(self._files[0])

    def close(self, *, remove: bool = False) -> None:
        """Close the file; nothing is written any more. `remove`: delete all, as the run has done its last step."""
        self._ended = True
        with self._held() as held:
            if held:
                self._close()
                for file in [*self._files] if remove else ():
                    self._forget(file)

    # -- lockstep

    def of_step(self, step: int, digest: str | None) -> StepJournal:
        """Return the part of a step that explorers generate for with one version."""
        return StepJournal(self, step, digest)

    def find(self, step: int, prompts: Sequence[int], digest: str | None) -> SampleBatch | None:
        """Return the samples of these prompts, by the version with this digest; None: they are to be generated."""
        with self._held() as held:
            made = self._made.get(tuple(GroupId(step, prompt) for prompt in prompts)) if held else None
            if made is None:
                return None
            if made.digest == digest:
                return self._batch(made)
            self._tell(
                f"its samples of step {step} were made by a version with the digest {made.digest}, this attempt has "
                f"{digest}: the steps since the checkpoint were not repeated bit for bit. From there on they are "
                "generated again",
                "digests",
            )
            return None

    # -- free

    def go_on(
        self, step: int, is_open: Callable[[GroupId], bool]
    ) -> tuple[dict[int, UpdateGroupIds], dict[GroupId, FinishedGroup]]:
        """Return what a run that resumes after `step` reuses: the groups of each following step, up to the first gap,
        and all finished groups. Samples made by versions after that gap are dropped for good. `is_open`: tells whether
        a group was not trained on up to `step`.
        """
        with self._held():
            last, taken = step, dict[int, UpdateGroupIds]()
            groups: dict[GroupId, FinishedGroup] = {}
            read: dict[int, SampleBatch] = {}
            for group, made in list(self._of_group.items()):
                if id(made) not in read:
                    read[id(made)] = self._batch(made) or SampleBatch.of([])
                batch = read[id(made)]
                rows = np.flatnonzero((batch.steps == group.step) & (batch.prompts == group.prompt))
                if not len(rows):  # it could not be read
                    continue
                oldest, _ = made.versions[made.prompts.index(group)]
                groups[group] = FinishedGroup(batch, rows, oldest, group in made.flat)
            repeated: set[GroupId] = set()
            while (found := self._took.get(last + 1)) is not None:
                of_step = {*found.all()}
                if not (groups.keys() >= of_step and all(map(is_open, found.groups))) or repeated & of_step:
                    break
                last += 1
                taken[last] = found
                repeated |= of_step
            if taken and last == self._repeated_to:  # its samples may be what ended the attempt
                for group in taken.pop(last).all():
                    repeated.discard(group)
                    self._drop(group)
                last -= 1
            self._write(b"kept", {"last": last})
            self._keep(last)
            for group in [one for one in self._of_group if one not in repeated and not is_open(one)]:
                self._drop(group)
            return taken, {group: one for group, one in groups.items() if group in self._of_group}

    def took(self, step: int, taken: UpdateGroupIds) -> None:
        """Write which groups a step trains on, before it does."""
        with self._held() as held:
            if not held:
                return
            self._took[step] = taken  # `cut` needs it also where it cannot be written
            if all(one in self._of_group for one in taken.all()):
                place = self._write(b"took", {"step": step, "taken": taken})
                if place is not None:
                    self._note_took(place.file, step, taken)

    # -- records

    def _note_made(self, made: _RecordSamples) -> None:
        file = made.place.file
        if made.digest is not None:
            self._made[tuple(made.prompts)] = made
            file.lockstep = True
            file.last_step = max(file.last_step, *(one.step for one in made.prompts))
            return
        for group in made.prompts:
            self._drop(group)
            self._of_group[group] = made
            file.groups.add(group)

    def _note_took(self, file: _File, step: int, taken: UpdateGroupIds) -> None:
        self._took[step] = taken
        self._repeated_to = None
        file.last_step = max(file.last_step, step)

    def _keep(self, last: int) -> None:
        """Forget the steps after `last`, and the samples of their versions: another history begins."""
        self._took = {step: taken for step, taken in self._took.items() if step <= last}
        self._repeated_to = last
        for file in self._files:
            if not file.lockstep:
                file.last_step = min(file.last_step, last)
        for group, made in list(self._of_group.items()):
            _, newest = made.versions[made.prompts.index(group)]
            if newest > last:
                self._drop(group)

    def _drop(self, group: GroupId) -> None:
        if (made := self._of_group.pop(group, None)) is not None:
            made.place.file.groups.discard(group)

    def _batch(self, made: _RecordSamples) -> SampleBatch | None:
        place = made.place
        try:
            with place.file.path.open("rb") as file:
                file.seek(place.offset)
                record = next(_records(file.read(place.nbytes)))
            return _samples(record.head["columns"], record.arrays)
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            self._tell(f"{place.file.path} cannot be read: {error}")
            return None

    def _forget(self, file: _File) -> None:
        self._files.remove(file)
        self._made = {key: made for key, made in self._made.items() if made.place.file is not file}
        self._of_group = {key: made for key, made in self._of_group.items() if made.place.file is not file}
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            self._tell(f"{file.path} cannot be deleted: {error}")

    # -- files

    def _read(self) -> None:
        for path in sorted(self._folder.glob("*.samples")):
            file = _File(path)
            try:
                content = path.read_bytes()
                ours = self._take_in(file, content)
            except OSError as error:
                self._tell(f"{path} cannot be read: {error}")
                continue
            self._files.append(file)
            if not ours:
                self._tell("it is of another run, other settings or other code, and is deleted", "others")
                self._forget(file)

    def _take_in(self, file: _File, content: bytes) -> bool:
        """Note all records of a file; return False if it is not of this run with these settings."""
        records = _records(content)
        try:
            first = next(records)
            if first.kind != b"head" or first.head != self._head:
                return False
            for record in records:
                head = record.head
                if record.kind == b"made":
                    self._note_made(_made(_RecordPlace(file, record.start, record.nbytes), head))
                elif record.kind == b"took":
                    taken = UpdateGroupIds(*(_groups(part) for part in cast("list[object]", head["taken"])))
                    self._note_took(file, cast(int, head["step"]), taken)
                elif record.kind == b"kept":
                    self._keep(cast(int, head["last"]))
                file.nbytes = record.start + record.nbytes
        except StopIteration:
            return True  # the disk was full, or the run died
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            self._tell(f"{file.path} is damaged after {file.nbytes} bytes ({error}); what follows is generated again")
        return True

    def _write(self, kind: _Kind, head: Mapping[str, object], columns: Sequence[_Blob] = ()) -> _RecordPlace | None:
        if self._stopped or self._ended or self._hangs:
            return None
        if columns:
            head = {**head, "columns": [[column.name, len(column.data)] for column in columns]}
        record = _record(kind, head, columns)
        # what is void has to be known also where the journal is full
        if kind != b"kept" and sum(file.nbytes for file in self._files) + len(record) > self._most_bytes:
            self._stopped = True
            self._tell(
                f"it has reached samples.journal_mb={self._most_bytes >> 20}: until a checkpoint is committed, samples "
                "are not written, and a run that goes on generates them again"
            )
            return None
        try:
            file = self._current()
            assert self._open is not None, "there is a current file"
            if self._open.write(record) != len(record):
                raise OSError("a record was written in part")
        except OSError as error:
            self._stopped = True
            self._close()
            self._tell(f"{self._folder} cannot be written: {error}; until a checkpoint is committed, no samples are")
            return None
        place = _RecordPlace(file, file.nbytes, len(record))
        file.nbytes += len(record)
        return place

    def _current(self) -> _File:
        if self._open is not None:
            return self._files[-1]
        self._folder.mkdir(parents=True, exist_ok=True)
        while (path := self._folder / f"{self._attempt:06}-{self._number:06}.samples").exists():
            self._number += 1
        self._open = path.open("xb", buffering=0)
        header = _record(b"head", self._head)
        self._files.append(_File(path))
        if self._open.write(header) != len(header):
            raise OSError("a header was written in part")
        self._files[-1].nbytes = len(header)
        return self._files[-1]

    def _close(self) -> None:
        closing, self._open = self._open, None
        if closing is not None:
            try:
                closing.close()
            except OSError as error:
                self._tell(f"{closing.name} cannot be written: {error}")

    @contextmanager
    def _held(self) -> Iterator[bool]:
        """Hold the lock; yield False where a disk that hangs holds it: nothing is written any more."""
        held = self._lock.acquire(timeout=0.0 if self._hangs else _HANGS_S)
        if not held:
            self._hangs = True
            self._tell(f"{self._folder} takes longer than {_HANGS_S:g} s to write; the run goes on without it")
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def _tell(self, why: str, kind: str = "") -> None:
        """Report a fault, once; of a `kind` only the first."""
        if (kind or why) not in self._told:
            self._told.add(kind or why)
            self._fault("journal of samples", why)


class StepJournal(NamedTuple):
    """A journal at one step of a run in lockstep, whose explorers hold the version with a digest."""

    journal: Journal
    step: int
    digest: str | None

    def find(self, prompts: Sequence[int]) -> SampleBatch | None:
        """See `Journal.find`."""
        return self.journal.find(self.step, prompts, self.digest)

    def append(self, batch: SampleBatch) -> None:
        """See `Journal.append`."""
        self.journal.append(batch, self.digest)


# Records.


class _Blob(NamedTuple):
    name: str
    data: bytes


def _record(kind: _Kind, head: object, columns: Sequence[_Blob] = ()) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    body = b"".join([_LENGTH.pack(len(text)), text, *(column.data for column in columns)])
    return _HEADER.pack(_MAGIC, kind, len(body), xxh3_128_digest(body)) + body


class _JournalRecord(NamedTuple):
    kind: bytes
    head: Mapping[str, object]
    arrays: memoryview
    start: int
    nbytes: int  # of the whole record


def _records(content: bytes) -> Iterator[_JournalRecord]:
    """Yield the records of a file. Raises ValueError at one that is torn or damaged."""
    at = 0
    while at < len(content):
        start = at + _HEADER.size
        if start > len(content):
            raise ValueError("its last record is torn")
        magic, kind, nbytes, digest = _HEADER.unpack_from(content, at)
        if magic != _MAGIC or start + nbytes > len(content):
            raise ValueError("its last record is torn" if magic == _MAGIC else "a record has no header")
        body = memoryview(content)[start : start + nbytes]
        if xxh3_128_digest(body) != digest:
            raise ValueError("a record has another digest")
        (length,) = _LENGTH.unpack_from(body)
        head = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
        yield _JournalRecord(kind, head, body[_LENGTH.size + length :], at, _HEADER.size + nbytes)
        at = start + nbytes


def _made(place: _RecordPlace, head: Mapping[str, object]) -> _RecordSamples:
    digest, prompts = head["digest"], _groups(head["prompts"])
    versions = [(int(oldest), int(newest)) for oldest, newest in cast("list[list[int]]", head["versions"])]
    if len(prompts) != len(versions):
        raise ValueError("a record has not one version for each group")
    return _RecordSamples(place, cast("str | None", digest), prompts, versions, frozenset(_groups(head["flat"])))


def _groups(values: object) -> list[GroupId]:
    return [GroupId(int(step), int(prompt)) for step, prompt in cast("list[list[int]]", values)]


_ARRAYS = {
    "steps": np.int64,
    "prompts": np.int64,
    "samples": np.int64,
    "version_attempts": np.int64,
    "rewards": np.float64,
    "exact": np.float64,
    "finished": np.bool_,
    "prompt_of": np.int64,
    "log_probs": np.float32,
}
"""The columns of a batch that are arrays with a fixed dtype."""
_PART = "part:"


def _columns(batch: SampleBatch) -> list[_Blob]:
    """Return a batch as bytes by column."""
    columns = [_Blob(name, getattr(batch, name).astype(dtype).tobytes()) for name, dtype in _ARRAYS.items()]
    columns += [_Blob(_PART + name, values.astype(np.float64).tobytes()) for name, values in batch.parts.items()]
    for name, rows in (("prompt_rows", batch.prompt_rows), ("responses", batch.responses)):
        columns += [_Blob(name, rows.ids.tobytes()), _Blob(f"{name}:ends", rows.offsets.tobytes())]
    columns += [_Blob("spans", batch.spans.rows.tobytes()), _Blob("spans:ends", batch.spans.offsets.tobytes())]
    for name, texts in (("texts", batch.texts), ("errors", batch.errors), ("explorers", batch.explorers.tolist())):
        columns.append(_Blob(name, json.dumps(list(texts)).encode()))
    return columns


def _samples(names: object, arrays: memoryview) -> SampleBatch:
    """Return the batch of `_columns`. Raises ValueError or KeyError: these are not its columns."""
    data: dict[str, memoryview] = {}
    for name, nbytes in cast("list[tuple[str, int]]", names):
        data[name], arrays = arrays[:nbytes], arrays[nbytes:]

    def rows(name: str) -> TokenRows:
        return TokenRows(np.frombuffer(data[name], np.int32), np.frombuffer(data[f"{name}:ends"], np.int64))

    texts = {name: tuple(json.loads(bytes(data[name]))) for name in ("texts", "errors", "explorers")}
    return SampleBatch(
        **{name: np.frombuffer(data[name], dtype) for name, dtype in _ARRAYS.items()},
        parts={
            name.removeprefix(_PART): np.frombuffer(data[name], np.float64) for name in data if name.startswith(_PART)
        },
        texts=texts["texts"],
        errors=texts["errors"],
        explorers=np.array(texts["explorers"], np.str_),
        prompt_rows=rows("prompt_rows"),
        responses=rows("responses"),
        spans=VersionSpans(
            np.frombuffer(data["spans"], np.int64).reshape(-1, 3), np.frombuffer(data["spans:ends"], np.int64)
        ),
    )
