"""States in memory of a verl program: which saves go there, and what the next start makes of them. No engine."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from tests.checkpoint.helpers import commit
from trinity_sync.checkpoint.folder.contents import read_tracker, step_dir
from trinity_sync.checkpoint.folder.owner import Owner, adopt, write_mark
from trinity_sync.checkpoint.memory_states import states_folder, states_path
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.integrations.verl import memory_saves, program_start
from trinity_sync.integrations.verl.vendor import MEMORY_INTERVAL, SHM_DIR
from trinity_sync.protocol.parts import FULL


class Mode(Enum):
    RAY = 1


class Handler:
    """As verl's, whose saves are noted."""

    mode, rank = Mode.RAY, 0

    def __init__(self, root: Path) -> None:
        self.default_local_dir, self.default_hdfs_dir, self.max_ckpt_to_keep = str(root), "hdfs://there", 5
        self.saved: list[tuple[int, Path, str | None, int]] = []

    def save_checkpoint(self, step: int) -> None:
        self.saved.append((step, Path(self.default_local_dir), self.default_hdfs_dir, self.max_ckpt_to_keep))


class SFTTrainer:
    """As verl's; it ends by an error in the step `fails`."""

    def __init__(self, root: Path, save_freq: int | str = 4, nodes: int = 1, fails: int | None = None) -> None:
        self.config = SimpleNamespace(trainer=SimpleNamespace(nnodes=nodes))
        self.ckpt_handler, self.save_freq, self.total_training_steps, self.fails = Handler(root), save_freq, 9, fails

    def fit(self) -> None:
        for step in range(1, 10):
            if step == self.fails:
                raise RuntimeError("planted")
            if step == 9 or step % int(self.save_freq) == 0:
                self.ckpt_handler.save_checkpoint(step=step)


class PPOTrainer:
    """As verl's V1 trainer."""

    def __init__(self, root: Path) -> None:
        names = {"default_local_dir": str(root), "default_hdfs_dir": "hdfs://there", "max_actor_ckpt_to_keep": 5}
        trainer = {**names, "max_critic_ckpt_to_keep": None, "save_freq": 4, "nnodes": 1}
        self.config = OmegaConf.create({"trainer": trainer})
        OmegaConf.set_struct(self.config, True)
        self.global_steps, self.total_training_steps, self.checkpoint_callback = 0, 9, Mock()
        self.saved: list[tuple[object, ...]] = []

    def fit(self, agent_loop_manager: object) -> None:
        trainer = self.config.trainer
        for self.global_steps in range(1, 10):
            if trainer.save_freq > 0 and (self.global_steps == 9 or self.global_steps % trainer.save_freq == 0):
                self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        trainer = self.config.trainer
        limits = trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep
        self.saved.append((self.global_steps, Path(trainer.default_local_dir), trainer.default_hdfs_dir, *limits))
        self.checkpoint_callback.on_save(trainer=self, global_step=self.global_steps, checkpoint_dir="there")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint folder of a program that keeps states."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv(SHM_DIR, str(tmp_path / "shm"))
    monkeypatch.setenv(MEMORY_INTERVAL, "2")
    for trainer in (SFTTrainer, PPOTrainer):
        monkeypatch.setattr(trainer, "fit", trainer.fit)
    module = ModuleType(__name__)
    vars(module).update(SFTTrainer=SFTTrainer, PPOTrainer=PPOTrainer)
    memory_saves.register(module)
    return tmp_path / "checkpoints"


@pytest.fixture
def memory(root: Path) -> Path:
    """What a killed program has left, with a state of step 6."""
    left = states_path(root, root.parent / "shm")
    left.mkdir(parents=True)
    write_mark(left, Owner.new(adopt(root), root))
    commit(left, 6)
    return left


def test_saves_that_verl_was_not_asked_for_go_to_memory(root: Path) -> None:
    trainer, memory = SFTTrainer(root), states_path(root, root.parent / "shm")
    trainer.fit()
    on_disk, in_memory = (root, "hdfs://there", 5), (memory, None, 1)
    assert trainer.ckpt_handler.saved == [(2, *in_memory), (4, *on_disk), (6, *in_memory), (8, *on_disk), (9, *on_disk)]


def test_saves_of_a_ppo_program_go_to_memory_without_its_callback(root: Path) -> None:
    trainer, memory = PPOTrainer(root), states_path(root, root.parent / "shm")
    trainer.fit(object())
    on_disk, in_memory = (root, "hdfs://there", 5, None), (memory, None, 1, 1)
    assert trainer.saved == [(2, *in_memory), (4, *on_disk), (6, *in_memory), (8, *on_disk), (9, *on_disk)]
    assert [call.kwargs["global_step"] for call in trainer.checkpoint_callback.on_save.call_args_list] == [4, 8, 9]


def test_steps_that_only_a_common_divisor_has_are_not_saved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_INTERVAL, "3")
    trainer = SFTTrainer(root)
    trainer.fit()
    assert [step for step, *_ in trainer.ckpt_handler.saved] == [3, 4, 6, 8, 9]


def test_a_program_that_ends_in_order_leaves_no_states(root: Path) -> None:
    SFTTrainer(root).fit()
    assert list((root.parent / "shm").iterdir()) == []


def test_a_program_that_fails_leaves_its_states(root: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        SFTTrainer(root, fails=5).fit()
    assert states_path(root, root.parent / "shm").is_dir()


@pytest.mark.parametrize(
    ("options", "interval", "told"),
    [
        ({"nodes": 2}, "2", "for programs on one machine, this one has 2 nodes"),
        ({"save_freq": -1}, "2", "trainer.save_freq=-1"),
        ({}, "often", f"{MEMORY_INTERVAL}=often has to be a whole number"),
    ],
)
def test_what_cannot_keep_states_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], interval: str, told: str
) -> None:
    monkeypatch.setenv(MEMORY_INTERVAL, interval)
    with pytest.raises(ConfigError, match=told):
        SFTTrainer(root, **options).fit()


def test_a_place_that_is_no_folder_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHM_DIR, str(root / "nothing"))
    with pytest.raises(ConfigError, match=f"{SHM_DIR}=.*has to be a folder"):
        SFTTrainer(root).fit()


def test_a_newer_state_becomes_the_checkpoint_that_is_resumed_from(root: Path, memory: Path) -> None:
    commit(root, 4)
    assert program_start.newest(root) == step_dir(root, 6)
    assert read_tracker(root, FULL).step == 6
    assert not memory.exists()


def test_a_state_without_any_checkpoint_is_resumed_from(root: Path, memory: Path) -> None:
    assert program_start.newest(root) == step_dir(root, 6)


def test_an_older_state_is_not_used(root: Path, memory: Path) -> None:
    commit(root, 8)
    assert program_start.newest(root) == step_dir(root, 8)
    assert not step_dir(root, 6).exists()


def test_a_state_that_fails_its_digest_is_told(root: Path, memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(root, 4)
    (step_dir(memory, 6) / "actor/model.pt").write_text("weights 7")
    assert program_start.newest(root) == step_dir(root, 4)
    assert "actor/model.pt" in capsys.readouterr().err


def test_states_of_a_program_that_still_runs_stop_the_start(root: Path, memory: Path) -> None:
    with states_folder(root, root.parent / "shm"), pytest.raises(RunError, match="in use by a live process"):
        program_start.newest(root)


def test_without_the_variable_nothing_is_looked_for(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_INTERVAL)
    commit(root, 4)
    assert program_start.newest(root) == step_dir(root, 4)
