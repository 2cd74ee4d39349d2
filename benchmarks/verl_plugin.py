"""verl's own SFT trainer with and without our two variables: how long saves block it, and what a whole run takes.

    python benchmarks/verl_plugin.py --json --rounds 3 --ranks 1 --rows 1 --words 1
    python benchmarks/verl_plugin.py --json --rounds 3

FSDP2 on CPUs, a model of 110 M parameters with random weights, parameters and Adam in fp32. `without` is verl as it is,
`with` the same command with `VERL_USE_EXTERNAL_MODULES` and `VERL_ENGINE_VENDOR` set. They take turns. A save is timed
around verl's `CheckpointHandler.save_checkpoint`, a step around the trainer's `train_batch`, both in rank 0; `beside`
are steps during which something was being written, `whole` is the process from its start to its end without the
imports: from the first step to the exit. `disk` is what the disk takes of one write and fsync of a save's bytes.

What saves weigh in `whole` is set by how long a step is. In the second command they weigh little: the two ranks compute
on both cores over rows of some sixty tokens, and verl's saves go no further than the page cache. The first command is
nearer to a model whose state is large against what a CPU computes in a step: a step is one short row, and the one rank
leaves a core free, as hosts of accelerators have.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = {
    "without": {"VERL_USE_EXTERNAL_MODULES": "trinity_sync.backends.cpu_platform"},
    "with": {
        "VERL_USE_EXTERNAL_MODULES": "trinity_sync.integrations.verl.plugin",
        "VERL_ENGINE_VENDOR": "trinity",
    },
}

ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

_TIMES = "TRINITY_BENCHMARK_TIMES"


def main() -> None:
    """Run and print; or, started by torchrun, be the program."""
    if _TIMES in os.environ:
        _program(Path(os.environ[_TIMES]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default 60)")
    parser.add_argument("--save-freq", type=int, default=5, help="steps from save to save (default 5)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step on each rank (default 2)")
    parser.add_argument("--words", type=int, default=4, help="words of ten tokens that a row is to learn (default 4)")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    disk = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        _prepare(folder, options.steps * 2 * options.rows * options.ranks, options.words)
        for _ in range(options.rounds):
            for way in WAYS:
                rounds[way].append(_run(folder, way, options))
            disk.append(_write(folder / "raw", int(rounds["with"][-1]["bytes"])))
        imports = {way: [_import_s(WAYS[way]) for _ in range(5)] for way in WAYS}
    results = {way: {key: statistics.median(one[key] for one in of) for key in of[0]} for way, of in rounds.items()}
    without, with_us = results["without"], results["with"]
    said = {
        "command": f"python benchmarks/verl_plugin.py --json --rounds {options.rounds} --steps {options.steps} "
        f"--save-freq {options.save_freq} --ranks {options.ranks} --rows {options.rows} --words {options.words}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "results": results,
        "disk_s": statistics.median(disk),
        "import_s": {way: statistics.median(of) for way, of in imports.items()},
        "ratios": {
            "blocked per save: without / with": without["save_s"] / with_us["save_s"],
            "step beside a save / other step": with_us["beside_s"] / with_us["step_s"],
            "whole: with / without": with_us["whole_s"] / without["whole_s"],
        },
    }
    print(json.dumps(said, indent=2) if options.json else said)


def _prepare(folder: Path, rows: int, words: int) -> None:
    import pandas as pd  # type: ignore[import-untyped]

    from tests.chat_models import byte_tokenizer
    from trinity_sync.models.architecture import make_model

    make_model(ARCHITECTURE, 0, folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    said = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "forty-two " * words}]
    pd.DataFrame([{"messages": said}] * rows).to_parquet(folder / "train.parquet")


def _run(folder: Path, way: str, options: argparse.Namespace) -> dict[str, float]:
    """Start the program, and return what it took."""
    import verl

    checkpoints, times = folder / "checkpoints", folder / "times.json"
    shutil.rmtree(checkpoints, ignore_errors=True)
    config = Path(str(verl.__file__)).parent / "trainer/config"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"),
        *(__file__, f"--config-path={config}", "--config-name=sft_trainer_engine"),
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={options.rows * options.ranks}",
        f"data.micro_batch_size_per_gpu={options.rows}",
        "data.num_workers=0",
        "data.max_length=128",
        "data.max_token_len_per_gpu=512",
        "data.ignore_input_ids_mismatch=True",
        f"model.path={folder}/model",
        "model.use_remove_padding=False",
        "model.enable_gradient_checkpointing=False",
        "+model.override_config.attn_implementation=eager",
        "engine.strategy=fsdp2",
        "engine.model_dtype=fp32",
        "trainer.total_epochs=2",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.save_freq={options.save_freq}",
        "trainer.max_ckpt_to_keep=2",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={checkpoints}",
        "trainer.device=cpu",
        f"hydra.run.dir={folder}/hydra",
    ]
    environment = {
        **os.environ,
        **WAYS[way],
        **{"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1", _TIMES: str(times)},
    }
    with (folder / f"{way}.log").open("w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    ended = time.time()
    if code:
        sys.exit((folder / f"{way}.log").read_text()[-3000:])
    told = json.loads(times.read_text())
    newest = max(checkpoints.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    steps: list[dict[str, float]] = told["steps"][1:]  # the first one warms up
    saves: list[dict[str, float]] = told["saves"]
    after = [one["s"] for one in steps if any(0 <= one["began"] - save["ended"] < save["s"] * 3 for save in saves)]
    beside = [one["s"] for one in steps if any(0 <= one["began"] - save["ended"] < 1 for save in saves)]
    others = [one["s"] for one in steps if one["s"] not in after and one["s"] not in beside]
    return {
        "save_s": statistics.median(one["s"] for one in saves),
        "step_s": statistics.median(others),
        "beside_s": statistics.median(beside or after),
        "whole_s": ended - steps[0]["began"],
        "bytes": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()),
    }


def _write(path: Path, nbytes: int) -> float:
    block = os.urandom(1 << 24)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


def _import_s(way: dict[str, str]) -> float:
    code = "import time; began = time.perf_counter(); import verl; print(time.perf_counter() - began)"
    environment = {**os.environ, **way, "VERL_PLATFORM": "cpu"}
    return float(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout)


def _program(times: Path) -> None:
    """verl's trainer, with a clock around its saves and steps."""
    import torch.distributed as dist
    import verl.utils.distributed as verl_distributed
    from verl.trainer import sft_trainer
    from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler
    from verl.workers.engine_workers import TrainingWorker

    told: dict[str, list[dict[str, float]]] = {"steps": [], "saves": []}

    def clocked(owner: type, name: str, key: str) -> None:
        real = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            result = real(*args, **kwargs)
            told[key].append({"began": began, "ended": time.time(), "s": time.time() - began})
            if dist.get_rank() == 0:
                times.write_text(json.dumps(told))
            return result

        setattr(owner, name, timed)

    def meet(timeout_second: float = 600) -> tuple[int, int, int]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_second), rank=rank, world_size=world)
        return int(os.environ["LOCAL_RANK"]), rank, world

    clocked(CheckpointHandler, "save_checkpoint", "saves")
    clocked(TrainingWorker, "train_batch", "steps")
    verl_distributed.initialize_global_process_group = meet
    sft_trainer.main()


if __name__ == "__main__":
    main()
