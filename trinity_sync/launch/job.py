"""A run from its actors to the end of its training loop. The launcher makes a `Job` once Ray is up."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trinity_sync.config import build, retention_policies
from trinity_sync.config.checks import sync_settings
from trinity_sync.errors import ProcessLoss, grown
from trinity_sync.host import interrupts
from trinity_sync.launch import sample_source
from trinity_sync.launch.actors import Actors, Setup

if TYPE_CHECKING:
    from trinity_sync.checkpoint.mirror.run_mirror import VersionCopies
    from trinity_sync.explorer.pool import ExplorerPool
    from trinity_sync.explorer.validation import Validation, VersionValidations
    from trinity_sync.protocol.versions import Version
    from trinity_sync.samples.journal import Journal
    from trinity_sync.sync.base import Publisher
    from trinity_sync.trainer.free_loop import FreeLoop
    from trinity_sync.trainer.full_saves import FullSaves, PublishedState, SaveSettings
    from trinity_sync.trainer.loop import TrainingLoop
    from trinity_sync.trainer.steps import AgreementCheck, LossValidation, RewardPenalty

_SETTLE_S = 20.0
"""Timeout of saves under way when a run ends early."""
_ANSWER_S = 2.0
"""The monitor answers so much earlier than the call to it is given up."""


class Job:
    """A run, from its actors to the end of its loop. Benchmarks replace its `loop` and its `worker`. `worker`: class of
    the trainer's ranks; None: `TrinityWorker`. `actors`: the run's actors.
    """

    worker: type | None = None

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._cfg = setup.cfg
        self._start = setup.start
        self._recorder = setup.recorder
        self.actors = Actors(setup, self.worker)
        self._copies: VersionCopies | None = None

    def start(self) -> None:
        """Build the actors and restore the checkpoint that the run starts from; errors as for `Actors.start`."""
        self.actors.start()

    def loop(self) -> None:
        """Do all steps, then finish all saves. Raises KeyboardInterrupt: it was interrupted."""
        from trinity_sync.trainer.full_saves import FullSaves

        actors, settings = self.actors, self._save_settings()
        published = self._published()
        # free explorers start a resumed run with the trainer's weights
        behind = published if actors.explores and not actors.free else None
        journal = sample_source.sample_journal(self._setup, explores=actors.explores)
        cut = None if journal is None else journal.cut
        memory = None
        if actors.memory_monitor is not None:
            memory = FullSaves(actors.memory_monitor, actors.trainer, settings, self._recorder, behind, records=False)
        saves = FullSaves(actors.monitor, actors.trainer, settings, self._recorder, behind, cut, memory=memory)
        loop = self._make_loop(saves, self._publisher(settings), published, journal)
        interrupts.check()
        if actors.explores:
            self._recorder.phase("sending the first version")
        completed = False
        try:
            completed = loop.run()
        except BaseException as error:
            self._recorder.failing()
            with contextlib.suppress(Exception):
                saves.settle(interrupts.left(_SETTLE_S, interrupts.REST_S))
            # the next attempt takes up the copies again
            heals = isinstance(error, ProcessLoss) and self._cfg.trainer.max_restarts > 0
            with contextlib.suppress(Exception):
                self._finish_copies(at_once=heals or isinstance(error, KeyboardInterrupt))
            raise
        finally:
            if journal is not None and (actors.rollout is None or not actors.rollout.paused):
                journal.close(remove=completed and self._setup.last_step >= self._cfg.trainer.steps)
        actors.synchronizer.set_trainer_status("stopped").result(actors.synchronizer.timeout_s)
        self._finish_copies(at_once=not completed)
        if not completed:
            raise KeyboardInterrupt

    def _save_settings(self) -> SaveSettings:
        from trinity_sync.trainer.full_saves import SaveSettings
        from trinity_sync.trainer.worker_spec import published_wire

        cfg, base = self._cfg, self.actors.base
        return SaveSettings(
            attempt=self._recorder.attempt,
            seed=cfg.seed,
            meta={
                "backend": cfg.backend.strategy,
                "world_size": cfg.backend.ranks,
                "config_digest": self._setup.config_digest,
                "wire": published_wire(self.actors.infos, cfg.sync.wire_dtype).to_json(),
                **({} if base is None else {"base": base.to_json()}),
                "left_out": self.actors.left_out,
                "reference": self.actors.reference,
            },
            ranks=[info.part for info in self.actors.infos],
            save_timeout_s=cfg.checkpoint.timeout_s,
            of_versions=base is None or self.actors.published_base is not None,
        )

    def _published(self) -> PublishedState:
        from trinity_sync.trainer.full_saves import PublishedState

        actors = self.actors
        holders = {info.node for info in actors.infos if info.layout is not None}
        agents = {node: agent for node, agent in actors.agents.items() if node in holders}
        read_s = grown(self._cfg.sync.limit_s, 2 * actors.version_bytes.node)  # they read and digest it
        return PublishedState(actors.synchronizer, agents, read_s)

    def _publisher(self, saves: SaveSettings) -> Publisher:
        from trinity_sync.checkpoint.folder.contents import DELTAS
        from trinity_sync.protocol.retention import KeepVersions
        from trinity_sync.sync.base import SyncMode, TrainerSide
        from trinity_sync.trainer.full_saves import WeightSaves

        self._copies = self._version_copies()
        cfg, actors, policies = self._cfg.sync, self.actors, retention_policies(self._cfg)
        settings = sync_settings(vars(cfg), self._cfg.explorer.kind)
        side = TrainerSide(
            synchronizer=actors.synchronizer,
            agents=actors.agents,
            ranks=actors.trainer.ranks,
            timeout_s=cfg.limit_s,
            version_bytes=actors.version_bytes,
            use_gpu=self._setup.use_gpu,
            store=WeightSaves(actors.monitor, saves, self._recorder, cfg.durable),
            deltas=self._start.checkpoints / DELTAS,
            versions=self._copies,
            explorer_nodes=dict if actors.pool is None else actors.pool.places,
            base_every=next((one.base_every for one in policies if isinstance(one, KeepVersions)), None),
        )
        return build("sync", settings, SyncMode).publisher(side)  # type: ignore[type-abstract]

    def _version_copies(self) -> VersionCopies | None:
        from trinity_sync.checkpoint.mirror.run_mirror import VersionCopies
        from trinity_sync.models.files import cached_folder

        store, start = self._setup.store, self._start
        if store is None or store.owner is None:
            return None
        return VersionCopies(
            start.checkpoints,
            store,
            model=cached_folder(self.actors.model_path),
            start=start.step if start.continued else None,
            report=self._recorder.event,
        )

    def _make_loop(
        self, saves: FullSaves, mode: Publisher, published: PublishedState, journal: Journal | None
    ) -> FreeLoop | TrainingLoop:
        from trinity_sync.trainer.free_loop import FreeLoop
        from trinity_sync.trainer.loop import TrainingLoop
        from trinity_sync.trainer.steps import LoopSettings, Steps

        cfg, actors, start, task = self._cfg, self.actors, self._start, self._setup.scanned.task
        settings = LoopSettings(
            steps=self._setup.last_step,
            first=start.step + 1,
            attempt=self._recorder.attempt,
            mode=cfg.sync.mode,
            sync_interval=cfg.sync.interval,
            max_staleness=cfg.sync.max_staleness,
            save_interval=cfg.checkpoint.interval,
            memory_interval=cfg.checkpoint.memory_interval,
            sync_timeout_s=cfg.sync.limit_s,
            step_timeout_s=max(cfg.backend.timeout_s * 4, 600),
            version_bytes=actors.version_bytes,
            base=actors.published_base,
            record_interval=cfg.samples.record_interval,
            record_groups=cfg.samples.record_groups,
            explores=actors.explores,
        )
        parts = [info.part for info in actors.infos if info.layout is not None]
        steps = Steps(
            settings,
            trainer=actors.trainer,
            synchronizer=actors.synchronizer,
            parts=parts,
            log=self._recorder,
            penalty=self._penalty(settings.step_timeout_s),
            agreement=self._agreement(settings.step_timeout_s),
        )
        if actors.free and actors.pool is not None:
            validations = self._version_validations(actors.pool)
            source = sample_source.free_data(
                cfg, task, start, actors.pool, self._recorder, validations, journal, outlives=actors.keeps
            )
            actors.rollout = source
            return FreeLoop(steps, source=source, mode=mode, saves=saves, stop=self._setup.stop, validator=validations)
        data = sample_source.lockstep_data(cfg, task, start, actors.model_path, actors.pool, mode, journal)
        return TrainingLoop(
            steps,
            data=data,
            mode=mode,
            saves=saves,
            restored=self._restored(published),
            stop=self._setup.stop,
            validator=self._validation(mode, settings.step_timeout_s),
        )

    def _penalty(self, step_timeout_s: float) -> RewardPenalty | None:
        """Make the penalty on divergence from a reference, if rewards have one."""
        from trinity_sync.trainer.algorithms.base import algorithm_of
        from trinity_sync.trainer.full_saves import driver_state
        from trinity_sync.trainer.steps import RewardPenalty

        settings = None if self._cfg.workload.kind == "bytes" else algorithm_of(self._cfg.algorithm).in_reward
        if settings is None:
            return None
        folder = self._start.folder
        saved = None if folder is None else driver_state(folder, "algorithm")
        return RewardPenalty(self.actors.trainer, settings, step_timeout_s, saved)

    def _agreement(self, step_timeout_s: float) -> AgreementCheck | None:
        """Make the check that trainer and explorers compute the same log-probs, if the run has one."""
        from trinity_sync.trainer.steps import AgreementCheck, agreement_bound

        choice = self._cfg.explorer.check_agreement
        if choice == "off" or self._cfg.workload.kind == "bytes" or self.actors.pool is None:
            return None
        bound = agreement_bound(self._cfg)
        return AgreementCheck(
            self.actors.trainer,
            self._recorder.event,
            bound,
            step_timeout_s,
            refuse=choice == "refuse",
            attempt=self._recorder.attempt,
        )

    def _version_validations(self, pool: ExplorerPool) -> VersionValidations | None:
        """Make the validation that runs concurrently with training, if the run has one."""
        cfg, start = self._cfg, self._start
        times = sample_source.validation_times(cfg, start, self._setup.folder.metrics, self._setup.last_step)
        if times is None:
            return None
        synchronizer, recorder = self.actors.synchronizer, self._recorder
        return sample_source.version_validations_of(
            cfg, self._setup.scanned, times, start=start, pool=pool, synchronizer=synchronizer, recorder=recorder
        )

    def _validation(self, mode: Publisher, step_timeout_s: float) -> Validation | LossValidation | None:
        """Make the validation between steps, if the run has one."""
        cfg, scanned, actors = self._cfg, self._setup.scanned, self.actors
        times = sample_source.validation_times(cfg, self._start, self._setup.folder.metrics, self._setup.last_step)
        if times is None:
            return None
        if actors.pool is not None:
            return sample_source.validation_of(cfg, scanned, times, actors.pool, mode)
        model_path, trainer = actors.model_path, actors.trainer
        return sample_source.loss_validation_of(
            cfg, scanned, times, model_path=model_path, trainer=trainer, step_timeout_s=step_timeout_s
        )

    def _restored(self, published: PublishedState) -> tuple[int, Callable[[Version, int], None]] | None:
        """Return the step of the version that explorers held when the checkpoint was saved, and the function that
        fills a slot with it; None if it cannot be restored.
        """
        from trinity_sync.trainer.full_saves import EXPLORER, published_step

        folder = self._start.folder
        if folder is None or not self.actors.explores or not (folder / EXPLORER).is_dir():
            return None
        layouts = [info.layout for info in self.actors.infos if info.layout is not None]
        step = None if self._start.weights_only else published_step(folder, layouts)
        if step is None:
            print(
                f"note: {folder} was saved by other trainer ranks, or with another sync.what, sync.wire_dtype or "
                "sync.keep_fp32, so the explorers begin with its own weights: the resumed run is not bit for bit the "
                "same",
                file=sys.stderr,
            )
            return None
        return step, partial(published.restore, folder)

    def _finish_copies(self, *, at_once: bool) -> None:
        """Wait for the copies to mirror and store that are under way; `at_once`: the run was interrupted. What is
        missing is reported also where the wait is interrupted.
        """
        try:
            self._wait_for_copies(at_once=at_once)
        except KeyboardInterrupt:
            if not at_once:
                self._wait_for_copies(at_once=True)
            raise

    def _wait_for_copies(self, *, at_once: bool) -> None:
        def limit() -> float:
            longest = self._cfg.checkpoint.mirror_wait_s
            return interrupts.left(min(longest, _SETTLE_S) if at_once else longest, interrupts.REST_S + _ANSWER_S)

        mirror, store = self._setup.mirror, self._setup.store
        if store is not None and self._copies is not None:
            self._recorder.phase(f"copying versions to {store.name}")
            waited = limit()
            store.report_missing(self._copies.finish(waited), waited, self._recorder.fault)
        if mirror is not None:
            self._recorder.phase(f"copying checkpoints to {mirror.name}")
            mirror.finish(self.actors.monitor, limit(), self._recorder.fault)
