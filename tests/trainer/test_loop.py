"""The loop of a supervised run: nothing is published, and its checkpoints are those of a run that publishes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from trinity_sync.actors.synchronizer_client import SealedVersion
from trinity_sync.protocol.versions import Version
from trinity_sync.trainer.loop import TrainingLoop
from trinity_sync.trainer.steps import LoopSettings, StagedVersion


class Ran:
    """What four steps did, with a save every second step and a validation of each version that is due."""

    def __init__(self, *, explores: bool, first: int = 1, memory_interval: int = 0, keeps: bool = True) -> None:
        limits: dict[str, Any] = {"sync_timeout_s": 1.0, "step_timeout_s": 1.0}
        settings = LoopSettings(
            **limits,
            steps=4,
            first=first,
            attempt=0,
            mode="memory",
            sync_interval=1,
            max_staleness=0,
            save_interval=2,
            memory_interval=memory_interval,
            explores=explores,
        )
        self.staged: list[int] = []
        self.steps, self.mode, self.saves, self.validator = (MagicMock() for _ in range(4))
        self.steps.settings = settings
        self.saves.keeps.return_value = keeps
        self.steps.stage.side_effect = self._stage
        self.steps.train.return_value = (None, {"loss": 0.5})
        self.steps.measure.return_value = self.steps.staleness.return_value = {}
        self.validator.at_start = True
        self.validator.run.side_effect = lambda step: {"val/loss": float(step)}
        data = MagicMock(load=MagicMock(return_value=[]), batch=MagicMock(return_value=SimpleNamespace(token_count=1)))
        loop = TrainingLoop(self.steps, data=data, mode=self.mode, saves=self.saves, validator=self.validator)
        assert loop.run()

    def _stage(self, version: Version) -> StagedVersion:
        self.staged.append(version.step)
        return StagedVersion(SealedVersion(version=version, slot=0, digest=f"d{version.step}", parts={}), 0.0, 0.0, 0.0)

    @property
    def saved(self) -> list[tuple[int, str, dict[str, float]]]:
        return [call.args for call in self.saves.begin.call_args_list]


def test_without_explorers_no_version_is_published_and_only_those_that_are_saved_are_staged() -> None:
    ran = Ran(explores=False)
    assert ran.staged == [2, 4]
    assert [call.args[0].step for call in ran.steps.discard.call_args_list] == [2, 4]
    ran.mode.publish.assert_not_called()


@pytest.mark.parametrize(("keeps", "kept"), [(True, [1, 3]), (False, [])])
def test_a_state_is_kept_in_memory_where_no_checkpoint_is_saved_or_under_way(keeps: bool, kept: list[int]) -> None:
    ran = Ran(explores=False, memory_interval=1, keeps=keeps)
    calls = ran.saves.begin.call_args_list
    assert [call.args[0] for call in calls if call.kwargs["in_memory"]] == kept
    assert [call.args[0] for call in calls if not call.kwargs["in_memory"]] == [2, 4]
    assert ran.staged == sorted([*kept, 2, 4])


@pytest.mark.parametrize("first", [1, 3])
def test_checkpoints_and_validations_without_explorers_are_as_with_them(first: int) -> None:
    alone, published = Ran(explores=False, first=first), Ran(explores=True, first=first)
    assert alone.saved == published.saved
    assert alone.saved[-1] == (4, "d4", {"loss": 0.5, "val/loss": 4.0})
    validated = [call.args[0] for call in alone.validator.run.call_args_list]
    assert validated == [call.args[0] for call in published.validator.run.call_args_list] == [*range(first - 1, 5)]
