"""verl's own SFT trainer as a program of two ranks on CPUs: started as its users start it, killed, started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import verl

from tests.chat_models import make_chat_model

MODULES = "VERL_USE_EXTERNAL_MODULES"
PLUGIN = {
    MODULES: "trinity_sync.integrations.verl.plugin",
    "VERL_ENGINE_VENDOR": "trinity",
}
"""What a user sets."""

WITHOUT_US = {MODULES: "trinity_sync.backends.cpu_platform"}
"""verl as it is; the module is what verl calls a platform, for CPUs."""

FSDP2 = ("+model.override_config.attn_implementation=eager", "engine.strategy=fsdp2")

MEGATRON = (
    *("engine=megatron", "optim=megatron", "engine.vanilla_mbridge=True", "engine.tensor_model_parallel_size=2"),
    *("data.use_dynamic_bsz=False", "optim.use_checkpoint_opt_param_scheduler=True"),
    *(
        f"++engine.override_transformer_config.{name}=False"
        for name in ("masked_softmax_fusion", "gradient_accumulation_fusion", "persist_layer_norm")
    ),
    "++engine.override_transformer_config.sequence_parallel=True",
    "++optim.override_optimizer_config.loss_scale=1.0",
)
"""What Megatron needs on CPUs, where it has no kernels of its own."""

LIMIT = 600.0
"""Limit of one program, seconds; most of what it takes is imports."""

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to be started, as often as one likes.

    Attributes:
        folder: of model, data, logs and checkpoints.
        overrides: verl's, further ones.
        environment: variables beside those that verl needs on a CPU.
        script: the program, in this folder.
        ranks: how many.
    """

    folder: Path
    overrides: tuple[str, ...] = ()
    environment: dict[str, str]
    script: str = "sft_on_cpu.py"
    ranks: int = 2

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def losses(self) -> dict[int, float]:
        """The loss of each step that was logged by the program that was started last."""
        lines = (json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["data"]["train/loss"] for line in lines if "train/loss" in line["data"]}

    def said(self) -> str:
        """What the last one printed."""
        return (self.folder / "output.log").read_text()

    @contextmanager
    def started(self) -> Iterator[Running]:
        """Start it; it is gone afterwards."""
        (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        with (self.folder / "output.log").open("w") as log:
            process = psutil.Popen(
                self._command(), cwd=self.folder, env=self._environment(), stdout=log, stderr=subprocess.STDOUT
            )
        running = Running(self, process)
        try:
            yield running
        finally:
            for one in [*running.ranks(), process]:
                with_children = [one] if not one.is_running() else [one, *one.children(recursive=True)]
                for each in with_children:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(LIMIT)

    def run(self) -> int:
        """Start it and wait for its end; return its exit code."""
        with self.started() as running:
            return running.wait()

    def _environment(self) -> dict[str, str]:
        of_cpu = {
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
        }
        return {**os.environ, **of_cpu, "VERL_FILE_LOGGER_PATH": str(self.folder / "metrics.jsonl"), **self.environment}

    def _command(self) -> list[str]:
        started = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}")
        return [*started, str(Path(__file__).parent / self.script), *self._sft()]

    def _sft(self) -> list[str]:
        """The arguments of verl's SFT trainers."""
        config = Path(str(verl.__file__)).parent / "trainer/config"
        return [
            f"--config-path={config}",
            "--config-name=sft_trainer_engine",
            f"data.train_files={self.folder}/train.parquet",
            "data.train_batch_size=8",
            "data.micro_batch_size_per_gpu=4",
            "data.num_workers=0",
            "data.max_length=64",
            "data.max_token_len_per_gpu=512",
            "data.ignore_input_ids_mismatch=True",
            f"model.path={self.folder}/model",
            "model.use_remove_padding=False",
            "trainer.total_epochs=1",
            "trainer.total_training_steps=6",
            "trainer.save_freq=2",
            "trainer.logger=[console,file]",
            f"trainer.default_local_dir={self.checkpoints}",
            "trainer.device=cpu",
            f"hydra.run.dir={self.folder}/hydra",
            *(() if "engine=megatron" in self.overrides else FSDP2),
            *self.overrides,
        ]


class Running:
    """A program that was started."""

    def __init__(self, program: Program, process: psutil.Popen) -> None:
        self._program = program
        self.process = process

    def wait(self) -> int:
        """Return its exit code."""
        return int(self.process.wait(LIMIT))

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, by number."""
        found = {}
        for one in self.process.children(recursive=True) if self.process.is_running() else []:
            try:
                number = one.environ().get("RANK")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if number is not None and one.ppid() == self.process.pid:
                found[int(number)] = one
        return [found[number] for number in sorted(found)]

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for something that it does, for its files tell of it alone."""
        deadline = time.monotonic() + LIMIT
        while not reached():
            assert self.process.poll() is None, f"it ended before {what}:\n{self._program.said()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} after {LIMIT:g} s"
            time.sleep(0.005)

    def kill(self, *numbers: int) -> None:
        """SIGKILL ranks; torchrun then ends the others."""
        for number, rank in enumerate(self.ranks()):
            if number in numbers:
                rank.send_signal(signal.SIGKILL)


def prepare(folder: Path) -> None:
    """Write a tiny model and 96 conversations."""
    make_chat_model(folder / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"{n}="}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(100, 196)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
