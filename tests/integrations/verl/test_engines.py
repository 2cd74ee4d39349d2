"""When an engine of ours waits for the copy of what it saved last: before what changes it, and before nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trinity_sync.integrations.verl.engine_registry import _is_last, _stays_put, through_us


class Verls:
    """What is called of verl's engine, in the order of the calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def optimizer_zero_grad(self) -> None:
        self.called.append("optimizer_zero_grad")

    def optimizer_step(self) -> float:
        self.called.append("optimizer_step")
        return 0.5

    def lr_scheduler_step(self) -> float:
        self.called.append("lr_scheduler_step")
        return 0.25

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        self.called.append("to")

    def load_checkpoint(self, local_path: str) -> None:
        self.called.append("load_checkpoint")

    def save_checkpoint(self, local_path: str) -> None:
        self.called.append("save_checkpoint")

    def get_per_tensor_param(self) -> None:
        self.called.append("get_per_tensor_param")

    def train_mode(self) -> Any:
        self.called.append("train_mode")
        return nullcontext()


@pytest.fixture
def engine() -> Any:
    made = through_us(Verls)()
    made.optimizer_config = SimpleNamespace(total_training_steps=9)
    made._saves = SimpleNamespace(
        previous_global_step=3,
        trainer_went_on=lambda: None,
        wait_until_copied=lambda: made.called.append("waited"),
    )
    return made


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("optimizer_step", lambda engine: engine.optimizer_step()),
        ("lr_scheduler_step", lambda engine: engine.lr_scheduler_step()),
        ("to", lambda engine: engine.to("cpu")),
        ("to", lambda engine: engine.to("cpu", model=False, grad=False)),
        ("to", lambda engine: engine.to(device="cpu", optimizer=False)),
        ("load_checkpoint", lambda engine: engine.load_checkpoint("root/global_step_2")),
        ("save_checkpoint", lambda engine: engine.save_checkpoint("root/global_step_4")),
        ("get_per_tensor_param", lambda engine: engine.get_per_tensor_param()),
    ],
)
def test_the_copy_is_waited_for_before(engine: Any, name: str, call: Callable[[Any], object]) -> None:
    call(engine)
    assert engine.called == ["waited", name]


def test_a_forward_and_backward_pass_go_on_beside_the_copy(engine: Any) -> None:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.to("cpu", model=False, optimizer=False, grad=False)  # as verl's modes do on a CPU
    assert engine.called == ["train_mode", "optimizer_zero_grad", "to"]


def test_what_verls_methods_return_is_returned(engine: Any) -> None:
    assert (engine.optimizer_step(), engine.lr_scheduler_step()) == (0.5, 0.25)


@pytest.mark.parametrize("offloads", [(True, False), (False, True)])
def test_what_verl_offloads_does_not_stay_put(offloads: tuple[bool, bool]) -> None:
    of_model, of_optimizer = offloads
    offloading = SimpleNamespace(is_param_offload_enabled=of_model, is_optimizer_offload_enabled=of_optimizer)
    assert not _stays_put(offloading)


def test_nor_does_what_workers_write_to_past_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = SimpleNamespace(is_param_offload_enabled=False, is_optimizer_offload_enabled=False)
    assert _stays_put(resident)
    workers = "verl.experimental.separation.engine_workers"
    monkeypatch.setitem(sys.modules, workers, ModuleType(workers))
    assert not _stays_put(resident)


@pytest.mark.parametrize(
    ("step", "scheduler", "is_last"),
    [
        (9, None, True),
        (8, None, False),
        (3, SimpleNamespace(last_epoch=9), True),  # several updates a step, as verl's `separate_async` has them
        (3, SimpleNamespace(num_steps=9), True),
        (3, SimpleNamespace(last_epoch=8), False),
    ],
)
def test_the_last_save_is_that_of_the_last_step_or_update(
    engine: Any, step: int, scheduler: object, is_last: bool
) -> None:
    engine._saves.previous_global_step, engine.lr_scheduler = step, scheduler
    assert _is_last(engine) is is_last
