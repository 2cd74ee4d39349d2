"""Decides where a run starts (at step 1, at its own newest checkpoint, or at another run's checkpoint) before Ray
starts, and reads the run's own record for that. The launcher, `trinity-sync resume` and `watch` call it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.backends.option import backend_option
from trinity_sync.checkpoint.folder import catalog, owner, recovery, resume_point
from trinity_sync.checkpoint.folder.contents import Manifest, NewerFormatError, read_manifest, read_tracker, step_of
from trinity_sync.checkpoint.folder.deletion import noted_deletions
from trinity_sync.checkpoint.folder.owner import Owner, Recorded
from trinity_sync.checkpoint.folder.resume_point import check_adapter, check_kind
from trinity_sync.checkpoint.memory_states import MemoryStates
from trinity_sync.checkpoint.mirror.run_mirror import MirrorSettings, RunMirror
from trinity_sync.config import Config, asked_again
from trinity_sync.config.lora_settings import adapter_of
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.urls import absolute, shown
from trinity_sync.protocol.parts import FULL
from trinity_sync.tracking.events import CommitEvent, MirrorEvent, PruneEvent, stream_events
from trinity_sync.tracking.run_record import read_record
from trinity_sync.tracking.units import progress_bar


@dataclass(frozen=True)
class Start:
    """The step after which a run starts, and its checkpoint."""

    step: int  # 0 for a fresh run
    resumed: bool  # the run is resumed in its own folder
    checkpoints: Path  # the run's checkpoint folder
    folder: Path | None  # the checkpoint to load; None: the initial model
    weights_only: bool = False  # load only the checkpoint's weights, and start with a new optimizer

    @property
    def continued(self) -> bool:
        """True if the checkpoint is in the run's own folder, so that everything up to its step is kept."""
        return self.resumed and self.folder is not None and self.folder.parent == self.checkpoints

    def taken_weights(self, model_folder: Path) -> Path:
        """Return the folder for another engine's weights, converted to Hugging Face format."""
        return model_folder.with_name(f"model-of-step-{self.step}")

    @classmethod
    def find(
        cls,
        cfg: Config,
        checkpoints: Path,
        begun: Start | None = None,
        *,
        resume: Resume | None,
        committed: Collection[int] = (),
        mirror: RunMirror | None = None,
        recorded: Recorded = (),
        states: MemoryStates | None = None,
    ) -> Start:
        """Find where a run starts. `begun`: of a new run, where `first` has found that. `states`: of the attempt
        before.
        """
        if resume is not None:
            return cls._resumed(cfg, checkpoints, mirror, resume, committed, recorded, states)
        start = begun or cls.first(cfg, checkpoints, None)
        if mirror is not None:
            mirror.check(checkpoints)
        return start

    @classmethod
    def first(cls, cfg: Config, checkpoints: Path, resume: Resume | None) -> Start:
        """Return where the run starts while it has no checkpoint of its own."""
        resumed = resume is not None
        if cfg.checkpoint.resume_from is None:
            return cls(0, resumed, checkpoints, None)
        folder = Path(resume.started_in if resume else "", cfg.checkpoint.resume_from)
        step, whole = _check_given(cfg, folder)
        return cls(step, resumed, checkpoints, folder, weights_only=not whole)

    @classmethod
    def _resumed(
        cls,
        cfg: Config,
        checkpoints: Path,
        mirror: RunMirror | None,
        resume: Resume,
        committed: Collection[int],
        recorded: Recorded,
        states: MemoryStates | None,
    ) -> Start:
        step = 0
        found = None
        # from scratch: the attempts of this program have begun again, and go on from their own states
        scratch = resume.from_scratch and not (states is not None and states.brought)
        if not scratch:
            with _advised():
                found = _newest(checkpoints, mirror, resume, committed, recorded)
        elif mirror is not None:
            mirror.check(checkpoints, recorded)
        if states is not None and (states.begun or not scratch) and states.bring(checkpoints, found):
            with _advised():
                found = resume_point.find(checkpoints, skip_unreadable=resume.skip_unreadable)
        if not scratch:  # a state in memory may be newer than all that is missing
            at_mirror = f" and checkpoint.mirror={mirror.name}" if mirror is not None else ""
            places, skips = f"checkpoint.dir={checkpoints}{at_mirror}", resume.skip_unreadable
            with _advised():
                resume_point.check_all_seen(checkpoints, found, committed, places=places, skip_missing=skips)
        step = found.step if found is not None else 0
        with _as_config_error():
            resume_point.check_start(checkpoints, step)
        if found is None:
            where = f"{checkpoints} or at {mirror.name}" if mirror is not None else str(checkpoints)
            why = "as asked for" if scratch else f"no checkpoint in {where} verifies yet"
            start = cls.first(cfg, checkpoints, resume)
            begin = "at step 1" if start.folder is None else f"with checkpoint.resume_from={start.folder}"
            print(f"{why}: the run begins again {begin}", file=sys.stderr)
            return start
        _check_steps(cfg, found.step, f"the run with checkpoints in {checkpoints}")
        assert found.manifest is not None, "a checkpoint that verifies has a manifest"
        _check_lora(cfg, found.path, found.manifest)
        whole = _check_engine(cfg, found.path, found.manifest.backend, found.manifest.world_size)
        return cls(found.step, True, checkpoints, found.path, weights_only=not whole)


def checkpoint_folder(cfg: Config, run: Path) -> Path:
    """Return the absolute checkpoint folder of a run."""
    return Path(cfg.checkpoint.dir or run / "checkpoints").absolute()  # absolute, for processes in other folders


def run_mirror(
    cfg: Config,
    owner: Owner,
    logs: Path | None = None,
    *,
    resume: Resume | None = None,
    copied: Collection[str] = (),
    key: str = "checkpoint.mirror",
) -> RunMirror | None:
    """Return the mirror of a run's committed checkpoints, or with the key `STORE` the place of its published versions,
    if it has one.
    """
    node, given = cfg.checkpoint, cfg.checkpoint.mirror if key == _MIRROR else cfg.sync.store
    if given is None:
        return None
    place, named = absolute(given), resume is not None and key in resume.given
    settings = MirrorSettings(
        key=key,
        options=node.mirror_options if key == _MIRROR else {},
        keep="bases" if key == STORE else "all" if node.mirror_keep == "all" else "same",
        tries=node.mirror_tries,
        backoff_s=node.mirror_backoff_s,
        timeout_s=node.mirror_timeout_s,
        named=named,
        marked=shown(place) in copied and not named,
    )
    return RunMirror(place, settings, owner, logs / "mirror.log" if logs is not None else None)


def look_before_resume(cfg: Config, checkpoints: Path, resume: Resume, committed: Collection[int]) -> None:
    """Check quickly, before anything is written, that a resume can see its checkpoints."""
    if resume.from_scratch:
        return
    with _advised():
        if not resume.skip_unreadable:
            try:
                resume_point.look(checkpoints)
            except resume_point.UnseenError:
                if cfg.checkpoint.mirror is None:
                    raise
        if committed and cfg.checkpoint.mirror is None and not any(checkpoints.glob("*global_step_*")):
            resume_point.check_all_seen(checkpoints, None, committed, places=f"checkpoint.dir={checkpoints}")


def _newest(
    checkpoints: Path, mirror: RunMirror | None, resume: Resume, committed: Collection[int], recorded: Recorded
) -> catalog.CheckpointInfo | None:
    """Return the newest checkpoint, here or fetched from the mirror; None: there is no commit yet."""
    recovery.finish_replacements(checkpoints)
    unread = False
    try:
        found = resume_point.find(checkpoints, skip_unreadable=resume.skip_unreadable, say=_say)
    except resume_point.UnseenError:
        if mirror is None:
            raise
        unread = True
        found = resume_point.find(checkpoints, skip_unreadable=True)
    if mirror is not None:
        least = 0 if resume.skip_unreadable else _least(checkpoints, found, committed, unread)
        with progress_bar("fetching from the mirror") as progress:
            fetched = mirror.fetch_newer(checkpoints, found, least, progress, recorded)
        if fetched is not None or unread:
            found = resume_point.find(checkpoints, skip_unreadable=resume.skip_unreadable)
    return found


def _least(checkpoints: Path, found: catalog.CheckpointInfo | None, committed: Collection[int], unread: bool) -> int:
    """Return the oldest step that is useful from the mirror: an older one would be refused here."""
    there = {info.step: info for info in catalog.scan(checkpoints)}
    after = found.step if found is not None else 0
    named = read_tracker(checkpoints, FULL).step
    known = {*committed, *([named] if named is not None else [])}
    lost = {step for step in known if step > after and step not in there}
    if unread:
        lost |= {step for step, info in there.items() if step > after and _cannot_be_read(info)}
    return max(lost, default=0)


def _cannot_be_read(info: catalog.CheckpointInfo) -> bool:
    return (catalog.verify(info.path) if info.kind == FULL else info).state == "unreadable"


@contextmanager
def _advised() -> Iterator[None]:
    """Add advice to the errors of a resume that cannot see or cannot understand a committed checkpoint."""
    try:
        yield
    except resume_point.UnseenError as error:
        raise ConfigError(
            f"{error}. Nothing was changed. Resume again when it can be read (is its file system mounted?), or: "
            "--skip-unreadable goes on from the newest checkpoint that can be read, --from-scratch begins again at "
            "step 1"
        ) from error
    except NewerFormatError as error:
        raise ConfigError(
            f"{error}. Nothing was changed. Use that version, or start a new run from an older checkpoint: "
            "checkpoint.resume_from=.../global_step_N"
        ) from error


@contextmanager
def _as_config_error(key: str | None = None) -> Iterator[None]:
    try:
        yield
    except RunError as error:
        raise ConfigError(f"{key}: {error}" if key else str(error)) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _check_given(cfg: Config, folder: Path) -> tuple[int, bool]:
    """Check the checkpoint that `checkpoint.resume_from` names (ours, verl's or Trinity's); return its step, and
    whether the run's engine can load all of it.
    """
    key = "checkpoint.resume_from"
    step = step_of(folder.resolve().name)
    if not folder.is_dir() or step is None:
        raise ConfigError(f"{key}={folder} is not a step folder; name one such as RUN/checkpoints/global_step_20")
    report = catalog.verify(folder)
    if report.state == "no_manifest":
        with _as_config_error(key):
            backend, world_size = catalog.recognise(folder)
    elif not report.ok:
        raise ConfigError(f"{key}: {report.problems[0]}")
    else:
        manifest = read_manifest(folder)
        if manifest.kind != "full":
            raise ConfigError(f"{key}={folder} holds weights only; a run can go on with a full checkpoint")
        _check_lora(cfg, folder, manifest)
        backend, world_size = manifest.backend, manifest.world_size
    if cfg.trainer.steps:
        _check_steps(cfg, step, f"{key}={folder}")
    return step, _check_engine(cfg, folder, backend, world_size)


def _check_steps(cfg: Config, step: int, what: str) -> None:
    if step >= cfg.trainer.steps:
        raise ConfigError(
            f"{what} has reached step {step} of trainer.steps={cfg.trainer.steps}: "
            f"to go on, give more, such as trainer.steps={step * 2}"
        )


def _check_lora(cfg: Config, folder: Path, manifest: Manifest) -> None:
    """Check that the run trains the same kind as the checkpoint: its adapter, or the whole model. The ranks check the
    adapter's base.
    """
    if cfg.workload.kind == "bytes":
        return  # adapters of workload=bytes have neither a base nor a peft config
    adapter = adapter_of(cfg.model.lora)
    check_kind(folder, manifest, lora=adapter is not None)
    if adapter is not None:
        # a regular expression needs the model, which does not exist yet
        targets = None if isinstance(adapter.targets, str) else adapter.targets
        check_adapter(folder, adapter.rank, adapter.alpha, targets, rslora=adapter.rslora)


def _check_engine(cfg: Config, path: Path, backend: str, world_size: int) -> bool:
    """Return whether the run's engine can load everything that another engine saved; if not, it takes the weights."""
    option = backend_option(cfg.backend)
    if backend not in option.reads and not option.takes_weights:
        raise ConfigError(
            f"{path} was saved by backend={backend}, which backend={option.strategy} cannot read; resume with "
            f"backend={backend}, or from a checkpoint that backend={option.strategy} saved"
        )
    if backend not in option.reads:
        print(
            f"note: {path} was saved by backend={backend}, this run goes on with backend={option.strategy}: with the "
            "same weights and at the same place in the learning-rate schedule, but the optimizer's averages start at "
            "zero",
            file=sys.stderr,
        )
        return False
    if note := option.check_resume(path, backend, world_size):
        print(f"note: {note}", file=sys.stderr)
    return True


# -- resumes in place, and what the run's record says


_DIR, _MIRROR, _RESUME_FROM = "checkpoint.dir", "checkpoint.mirror", "checkpoint.resume_from"
STORE = "sync.store"
"""Key of the place of published versions."""
PLACES = (_DIR, _MIRROR, _RESUME_FROM, STORE)


@dataclass(frozen=True)
class Resume:
    """Resume in place from the newest checkpoint that verifies."""

    from_scratch: bool = False  # start again at step 1; existing checkpoints are set aside
    skip_unreadable: bool = False  # use an older checkpoint if newer ones cannot be read or are gone
    started_in: Path = Path()  # folder of the first start, from which relative paths count
    given: frozenset[str] = frozenset()  # keys of `PLACES` on the command line of this resume


def written_places(cfg: Config, run: Path) -> dict[str, str | None]:
    """Return the resolved places of checkpoints by config key, for run.json; without places that have a password."""
    saved = cfg.checkpoint
    found = {_DIR: saved.dir, _MIRROR: saved.mirror, _RESUME_FROM: saved.resume_from, STORE: cfg.sync.store}
    if (place := found[_DIR]) is not None:
        folder = Path(place).absolute()
        found[_DIR] = str(folder.relative_to(run) if folder.is_relative_to(run) else folder)
    for key in (_MIRROR, STORE):
        if (place := found[key]) is not None:
            found[key] = absolute(place)
    return {key: place for key, place in found.items() if place is None or shown(place) == place}


def used_places(run: Path) -> dict[str, str | None]:
    """Return the places of checkpoints by config key that a resume uses, from run.json."""
    recorded = read_record(run / "run.json").get("places") or {}
    found = {key: recorded[key] for key in PLACES if key in recorded}
    if (folder := found.get(_DIR)) is not None:
        found[_DIR] = str(run / folder)
    return found


def planned_steps(run: Path) -> int | None:
    """Return the last step that the newest attempt of a run planned, from run.json; None: it has none."""
    steps = read_record(run / "run.json").get("total_steps")
    return steps if isinstance(steps, int) else None


def resume_command(run: Path, called: str) -> str:
    """Return the command line that resumes a run, with all arguments that it needs."""
    try:
        asked = asked_again(run, used_places(run))
    except ConfigError:
        asked = []  # the resume itself reports the problem
    return " ".join(["trinity-sync resume", shlex.quote(called), *asked])


def check_owned(run: Path, checkpoints: Path, *, named: bool = False) -> None:
    """Check that a checkpoint folder belongs to the run in a folder. Writes nothing."""
    id = read_record(run / "run.json").get("id", "")  # earlier releases have no id
    owner.check(checkpoints, owner.Owner.new(id, run), recorded=recorded_commits(run / "events.jsonl"), named=named)


def recorded_commits(path: Path) -> owner.Recorded:
    """Return the commits in a run's events. Raises RunError if the events cannot be read."""
    commits = (event for event in stream_events(path) if isinstance(event, CommitEvent))
    return {(event.step, event.attempt, event.digest, event.bytes) for event in commits}


def copied_to(events: Path) -> set[str]:
    """Return the mirrors that have copies of a run's checkpoints, by its events. Raises RunError if they cannot be
    read.
    """
    copies = (event for event in stream_events(events) if isinstance(event, MirrorEvent))
    return {event.url for event in copies if event.state == "copied"}


def committed_steps(events: Path, checkpoints: Path) -> list[int]:
    """Return the steps of a run's committed full checkpoints that still exist by its events, ascending."""
    steps: set[int] = set()
    gone = noted_deletions(checkpoints)
    for event in stream_events(events):
        if isinstance(event, PruneEvent):
            steps.discard(event.step)
        elif isinstance(event, CommitEvent) and event.kind == FULL and (event.step, event.attempt) not in gone:
            steps.add(event.step)
    return sorted(steps)
