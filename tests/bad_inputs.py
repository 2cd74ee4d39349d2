"""Inputs that a run has to refuse: what is given, and what has to be said, when, and with which exit code.

`test_bad_inputs.py` runs the table. `python -m tests.bad_inputs FILE` measures how long each refusal takes in a program
that is up, and writes that as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import launch as program
from trinity_sync.launch import app

When = Literal["config", "data", "ray", "run"]
Files = Mapping[str, str | bytes]


class RayWouldStartError(Exception):
    """An input has passed all that is looked at before Ray starts."""


@dataclass(frozen=True, kw_only=True)
class Bad:
    """An input that is refused.

    Attributes:
        given: overrides on the command line; paths are relative to the folder that it is run in.
        says: what the last lines on stderr have to contain.
        files: made in that folder before, by name.
        when: at what it is noticed: the settings, the data and the model's files, Ray, or a step of the run.
        code: of the program.
    """

    given: Sequence[str]
    says: Sequence[str]
    files: Files = field(default_factory=dict)
    when: When = "config"
    code: int = app.REFUSED

    def __str__(self) -> str:
        return " ".join(self.given)[:80]


@dataclass(frozen=True)
class Outcome:
    """What became of an input."""

    code: int
    said: str
    seconds: float


def make_files(folder: Path, files: Files) -> None:
    """Write files, with their folders."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def tried(bad: Bad, folder: Path) -> Outcome:
    """Run the program in this process, without Ray, in a folder with the files of an input."""
    make_files(folder, bad.files)
    said = io.StringIO()
    with contextlib.chdir(folder), _importing_from(folder), _without_ray(), contextlib.redirect_stderr(said):
        began = time.perf_counter()
        # that mode spares Hydra a composition by which it would find out
        code = app.run_main(program.main, ["hydra.mode=RUN", "hydra.run.dir=run", *bad.given])
        seconds = time.perf_counter() - began
    return Outcome(code, said.getvalue(), seconds)


@contextlib.contextmanager
def _without_ray() -> Iterator[None]:
    def start(*args: Any, **kwargs: Any) -> None:
        raise RayWouldStartError

    with patch("trinity_sync.launch.launcher.cluster", start):
        yield


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Have modules in a folder found, and forgotten again."""
    before = set(sys.modules)
    with patch.object(sys, "path", [str(folder), *sys.path]), patch.dict(os.environ):
        yield
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# ---- files


def safetensors(**shapes: Sequence[int]) -> bytes:
    """A file of zeros in bf16, by the names of tensors with `__` in place of dots."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, size = end, 2
        for extent in shape:
            size *= extent
        end += size
        header[name.replace("__", ".")] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def model(weights: Files | None = None, **fields: object) -> Files:
    """The folder `m` of a Qwen3; of its weights there is the embedding alone."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        **fields,
    }
    if weights is None:
        weights = {"model.safetensors": safetensors(model__embed_tokens__weight=(320, 32))}
    return {"m/config.json": json.dumps(config), **{f"m/{name}": content for name, content in weights.items()}}


def jsonl(*rows: object, name: str = "d.jsonl") -> Files:
    """A file of rows; a text stands for its line."""
    return {name: "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)}


def reward(source: str) -> Files:
    """A module `rw`, and a file of rows."""
    return {"rw.py": source, **jsonl({"prompt": "1+1=", "answer": "2"})}


def index(**files: str) -> str:
    """The index of weights in several files."""
    return json.dumps({"weight_map": {name.replace("__", "."): file for name, file in files.items()}})


ROW = jsonl({"prompt": "1+1=", "answer": "2"})
JSONL = ["task=jsonl", "task.path=d.jsonl"]
MODEL = ["model=path", "model.path=m"]
REWARD = [*JSONL, "task.reward._target_=rw.f"]


# ---- the table

_VALUES = [
    Bad(given=["backend.ranks=0"], says=["backend.ranks is 0", "at least 1"]),
    Bad(given=["backend.ranks=two"], says=["backend.ranks is two", "whole number"]),
    Bad(given=["backend.ranks=null"], says=["backend.ranks is null", "needs a value"]),
    Bad(given=["backend.ranks=1.5"], says=["backend.ranks is 1.5", "whole number"]),
    Bad(given=["backend.ranks=-1"], says=["backend.ranks is -1"]),
    Bad(given=["backend.rank=2"], says=["backend.rank is not a setting", "did you mean ranks?"]),
    Bad(given=["+backend.rank=2"], says=["backend.rank", "is not a setting"]),
    Bad(given=["backend=fsdp3"], says=["backend=fsdp3 is not an option", "fsdp2"]),
    Bad(given=["backend=null"], says=["backend cannot be null; it has bytes, fsdp"]),
    Bad(given=["backend.fsdp_size=0"], says=["backend.fsdp_size is 0", "divide backend.ranks"]),
    Bad(given=["backend.fsdp_size=3", "backend.ranks=2"], says=["backend.fsdp_size is 3"]),
    Bad(given=["backend=fsdp", "backend.ranks=2", "backend.fsdp_size=1"], says=["backend.fsdp_size", "backend=fsdp2"]),
    Bad(given=["backend.sp=3", "backend.ranks=2"], says=["backend.sp is 3", "divide backend.ranks"]),
    Bad(given=["backend.param_dtype=fp8"], says=["backend.param_dtype is fp8", "bf16"]),
    Bad(given=["backend.timeout_s=0"], says=["backend.timeout_s is 0", "more than 0"]),
    Bad(given=["backend.strategy=megatron"], says=["backend.strategy is megatron", "choose backend=megatron"]),
    Bad(given=["backend._target_=os.path"], says=["backend._target_ is os.path"]),
    Bad(given=["backend._target_=nowhere.Engine"], says=["backend._target_", "no module nowhere", "PYTHONPATH"]),
    Bad(given=["backend.overrides.no_such=1"], says=["backend.overrides.no_such"]),
    Bad(given=["+backend.overrides.no_such=1"], says=["backend.overrides.no_such", "verl"]),
    Bad(given=["+backend.overrides.wrap_polcy={}"], says=["backend.overrides.wrap_polcy", "wrap_policy"]),
    Bad(given=["+backend.overrides.model_dtype=bf16"], says=["backend.overrides.model_dtype", "backend.master_dtype"]),
    Bad(given=["+backend.overrides.forward_only=true"], says=["backend.overrides.forward_only", "leave it out"]),
    Bad(given=["sync=nccl", "sync.transport=nccl"], says=["sync.transport is nccl", "GPU", "gloo"]),
    Bad(given=["sync=nccl", "sync.transport=ib"], says=["sync.transport is ib", "gloo"]),
    Bad(given=["sync=nccl", "sync.transport=tcp"], says=["sync.transport is tcp", "sync=memory", "gloo"]),
    Bad(given=["sync=shared"], says=["sync=shared is not an option", "memory"]),
    Bad(given=["sync.interval=0"], says=["sync.interval is 0", "at least 1"]),
    Bad(given=["sync.interval=4"], says=["sync.max_staleness is 0", "sync.interval=4"]),
    Bad(given=["sync.max_staleness=-1"], says=["sync.max_staleness is -1"]),
    Bad(given=["sync.slots=0"], says=["sync.slots is 0"]),
    Bad(given=["sync.timeout_s=-3"], says=["sync.timeout_s is -3"]),
    Bad(given=["sync.timeout_s=.inf"], says=["sync.timeout_s"]),
    Bad(given=["sync.timeout_s=soon"], says=["sync.timeout_s is soon", "a number"]),
    Bad(given=["sync.min_rate_mbps=0"], says=["sync.min_rate_mbps is 0", "more than 0"]),
    Bad(given=["sync.min_rate_mbps=.inf"], says=["sync.min_rate_mbps is .inf", "a number"]),
    Bad(given=["sync.min_rate_mbps=slow"], says=["sync.min_rate_mbps is slow", "a number"]),
    Bad(given=["sync.wire_dtype=int8"], says=["sync.wire_dtype is int8"]),
    Bad(given=["sync.verify=of"], says=["sync.verify is of", "off"]),
    Bad(given=["sync.mode=checkpoint"], says=["sync.mode is checkpoint", "sync=checkpoint"]),
    Bad(given=["sync=nccl", "trainer.schedule=free"], says=["trainer.schedule is free", "sync=memory"]),
    Bad(given=["sync.shm_dir=/nowhere"], says=["sync.shm_dir is /nowhere", "does not exist", "/dev/shm"]),
    Bad(given=["sync.shm_dir=f"], files={"f": ""}, says=["sync.shm_dir is f", "is a file"]),
    Bad(given=["sync.shm_dir=/proc"], says=["sync.shm_dir is /proc", "cannot be written to"]),
    Bad(given=["tracker=mlflow", "tracker.mlflow.uri='http:/x'"], says=["tracker.mlflow.uri is http:/x", "5000"]),
    Bad(given=["tracker=trackio", "tracker.trackio.folder=/proc/t"], says=["tracker.trackio.folder is /proc/t"]),
    Bad(given=["retention=[]"], says=["retention", "at least one"]),
    Bad(given=["retention=[keep_first]"], says=["retention=keep_first is not an option", "keep_last"]),
    Bad(given=["retention.policies.keep_last.n=0"], says=["retention.policies.keep_last.n"]),
    Bad(given=["retention.policies.keep_last=3"], says=["retention.policies.keep_last"]),
    Bad(given=["checkpoint.interval=-1"], says=["checkpoint.interval is -1"]),
    Bad(given=["checkpoint.interval=often"], says=["checkpoint.interval is often", "whole number"]),
    Bad(given=["checkpoint.format=hdf5"], says=["checkpoint.format is hdf5"]),
    Bad(given=["checkpoint.dir=f/c"], files={"f": ""}, says=["checkpoint.dir is", "is a file"]),
    Bad(given=["checkpoint.dir=~no-such-user/c"], says=["checkpoint.dir", "~"]),
    Bad(given=["checkpoint.mirror=gopher://x/y"], says=["checkpoint.mirror", "gopher"]),
    Bad(given=["checkpoint.monitor._target_=a.B"], says=["checkpoint.monitor._target_ is a.B", "no module a"]),
    Bad(given=["checkpoint.timeout_s=0"], says=["checkpoint.timeout_s is 0"]),
    Bad(given=["trainer.steps=0"], says=["trainer.steps is 0"]),
    Bad(given=["trainer.lr=-1"], says=["trainer.lr is -1"]),
    Bad(given=["trainer.lr=fast"], says=["trainer.lr is fast", "a number"]),
    Bad(given=["trainer.lr=.nan"], says=["trainer.lr is .nan", "must be a number"]),
    Bad(given=["trainer.betas=[0.9]"], says=["trainer.betas", "two numbers"]),
    Bad(given=["trainer.betas=[0.9,1.0]"], says=["trainer.betas", "less than 1"]),
    Bad(given=["trainer.warmup_steps=10", "trainer.steps=5"], says=["trainer.warmup_steps is 10", "trainer.steps (5)"]),
    Bad(given=["trainer.lr_scheduler=sine"], says=["trainer.lr_scheduler is sine"]),
    Bad(given=["trainer.schedule=slow"], says=["trainer.schedule is slow", "lockstep"]),
    Bad(given=["trainer.mini_batches=5"], says=["trainer.mini_batches"]),
    Bad(given=["trainer.max_tokens=0"], says=["trainer.max_tokens is 0"]),
    Bad(given=["algorithm=ppo"], says=["algorithm=ppo is not an option", "grpo"]),
    Bad(given=["algorithm.prompts_per_step=0"], says=["algorithm.prompts_per_step is 0"]),
    Bad(given=["algorithm.samples_per_prompt=0"], says=["algorithm.samples_per_prompt is 0"]),
    Bad(given=["algorithm=sft"], says=["task", "algorithm=sft"]),
    Bad(given=["explorer.replicas=0"], says=["explorer.replicas is 0"]),
    Bad(given=["explorer=sglang"], says=["explorer=sglang is not an option", "vllm"]),
    Bad(given=["explorer.dtype=fp16"], says=["explorer.dtype"]),
    Bad(given=["explorer.dtype=bf16", "sync.wire_dtype=fp32"], says=["explorer.dtype is bf16", "sync.wire_dtype"]),
    Bad(given=["samples.over_stale=keep"], says=["samples.over_stale is keep"]),
    Bad(given=["samples.buffer=0"], says=["samples.buffer is 0"]),
    Bad(given=["tracker=[wandbb]"], says=["tracker=wandbb is not an option", "did you mean wandb?"]),
    Bad(given=["tracker=[mlflow,mlflo]"], says=["tracker=mlflo is not an option", "did you mean mlflow?"]),
    Bad(given=["workload=bytes"], says=["model.shapes has no value"]),
    Bad(given=["model.shapes=qwen3-0.6b"], says=["model.shapes", "workload=bytes"]),
    Bad(given=["model.layers=2"], says=["model.layers is 2", "model.shapes"]),
    Bad(given=["name=a/b"], says=["name is 'a/b'", "folder"]),
    Bad(given=["name="], says=["name"]),
    Bad(given=["seed=x"], says=["seed is x", "whole number"]),
    Bad(given=["live=no"], says=["live", "off"]),
    Bad(given=["experiment=nothing"], says=["experiment=nothing is not an option"]),
    Bad(given=["sed=3"], says=["sed is not a setting", "did you mean seed?"]),
    Bad(given=["seed"], says=["seed", "key=value"]),
    Bad(given=["seed=1,2"], says=["seed"]),
    Bad(given=["name=${nothing}"], says=["nothing"]),
    Bad(given=["task=copy"], says=["task=copy is not an option", "copy_digits"]),
    Bad(given=["task._target_=null"], says=["task._target_"]),
    Bad(given=["task._target_=nowhere.Task"], says=["task._target_", "nowhere"]),
    Bad(given=["task.digits=0"], says=["digits"]),
    Bad(given=["task.digits=many"], says=["task.digits is many", "whole number"]),
    Bad(given=["task.response_length=0"], says=["task.response_length is 0"]),
    Bad(given=["task.response_length=500"], says=["task.response_length", "500", "128 positions of the model"]),
    Bad(given=["cluster=slurm"], says=["cluster=slurm is not an option", "local"]),
    Bad(given=["cluster=existing"], says=["cluster.address has no value"]),
    Bad(given=["cluster.num_cpus=0"], says=["cluster.num_cpus is 0", "at least 1"]),
    Bad(given=["cluster.num_cpus=1"], says=["cluster.num_cpus is 1", "backend.ranks"]),
    Bad(given=["cluster.num_cpus=3", "explorer.replicas=5"], says=["cluster.num_cpus is 3", "explorer.replicas"]),
    Bad(given=["cluster.temp_dir=f"], files={"f": ""}, says=["cluster.temp_dir", "is a file"]),
    Bad(given=["cluster.temp_dir=/proc/r"], says=["cluster.temp_dir", "/proc"]),
    Bad(
        given=[f"cluster.temp_dir={'x' * 120}"],
        says=["cluster.temp_dir", "sockets lie below it"],
    ),
    Bad(given=["cluster.start_timeout_s=0"], says=["cluster.start_timeout_s is 0"]),
    Bad(given=["cluster.rejoin_s=-1"], says=["cluster.rejoin_s is -1"]),
    Bad(given=["hydra.run.dir=f/run"], files={"f": ""}, says=["f", "hydra.run.dir"]),
    Bad(given=["hydra.run.dir=/proc/run"], says=["/proc/run"]),
]

_MODELS = [
    Bad(given=["model.path=nowhere/at/all"], says=["model.path is nowhere/at/all", "does not exist"]),
    Bad(given=["model=path"], says=["model.path has no value"]),
    Bad(given=["model.architecture=null"], says=["model.path is null", "model.architecture"]),
    Bad(given=MODEL, files={"m/x": ""}, says=["model.path", "without config.json"]),
    Bad(given=MODEL, files={"m": ""}, says=["model.path", "a file"]),
    Bad(
        given=MODEL, files={"m/run.json": "{}"}, says=["model.path is m", "trinity-sync ckpt export m --output m-model"]
    ),
    Bad(
        given=["model.path=m/checkpoints"],
        files={"m/run.json": "{}", "m/checkpoints/.run.json": "{}"},
        says=["model.path is m/checkpoints", "export its model first"],
    ),
    Bad(
        given=["model.path=m/global_step_5"],
        files={"m/global_step_5/manifest.json": "{}"},
        says=["model.path", "trinity-sync ckpt export m/global_step_5 --output global_step_5-model"],
    ),
    Bad(
        given=["model.path=global_step_5/actor/huggingface"],
        files={"global_step_5/actor/huggingface/config.json": model(weights={})["m/config.json"]},
        says=["no weights", "/global_step_5 --output global_step_5-model"],
    ),
    Bad(given=MODEL, files={"m/config.json": '{"model_type": '}, says=["model.path", "config.json cannot be read"]),
    Bad(given=MODEL, files={"m/config.json": "[]"}, says=["model.path", "not a JSON object"]),
    Bad(given=MODEL, files={"m/config.json": "{}", "m/model.safetensors": ""}, says=["model.path", "model_type"]),
    Bad(given=MODEL, files=model(model_type="qwen33"), says=["model.path", "'qwen33'", "did you mean qwen3"]),
    Bad(
        given=MODEL,
        files=model(model_type="mine", auto_map={"AutoConfig": "c.C"}),
        says=["model.trust_remote_code is false", "auto_map"],
    ),
    Bad(
        given=MODEL,
        files={**model(), "m/adapter_config.json": "{}"},
        says=["model.path: m/adapter_config.json", "LoRA adapter", "remove that file"],
        when="data",
    ),
    Bad(
        given=["algorithm.kl.coeff=0.1", "algorithm.kl.reference=r"],
        files={"r/config.json": model(vocab_size=32)["m/config.json"], "r/adapter_config.json": "{}"},
        says=["algorithm.kl.reference: r/adapter_config.json", "LoRA adapter"],
        when="data",
    ),
    Bad(
        given=[*MODEL, "model.trust_remote_code=true"],
        files=model(auto_map={"AutoModelForCausalLM": "modeling_mine.M"}),
        says=["model.path: m/config.json names modeling_mine.py in auto_map", "file is missing"],
        when="data",
    ),
    Bad(given=MODEL, files=model(weights={}), says=["model.path", "no weights", "model.safetensors"]),
    Bad(
        given=MODEL,
        files=model(weights={"model.safetensors.index.json": index(a="model-1.safetensors")}),
        says=["model.path", "model-1.safetensors", "is not there"],
    ),
    Bad(
        given=MODEL,
        files=model(weights={"model.safetensors.index.json": "{"}),
        says=["model.path", "model.safetensors.index.json"],
    ),
    Bad(
        given=MODEL,
        files=model(weights={"model.safetensors.index.json": "{}"}),
        says=["model.path", "model.safetensors.index.json", "weight_map"],
    ),
    Bad(given=MODEL, files=model(weights={"model.safetensors": b"abc"}), says=["model.path", "model.safetensors"]),
    Bad(
        given=MODEL,
        files=model(weights={"model.safetensors": safetensors(a=(4, 4))[:-3]}),
        says=["model.path", "model.safetensors", "bytes"],
    ),
    Bad(given=MODEL, files=model(vocab_size=400), says=["model.path", "vocab_size", "400", "320"]),
    Bad(given=MODEL, files=model(vocab_size="many"), says=["model.path", "vocab_size"]),
    Bad(
        given=[*MODEL, "model.attn_implementation=flash_attention_2"],
        files=model(),
        says=["model.attn_implementation is flash_attention_2", "flash_attn", "not installed"],
    ),
    Bad(given=["model.attn_implementation=fast"], says=["model.attn_implementation is fast", "sdpa"]),
    Bad(given=[*MODEL], files=model(model_type="gpt_oss"), says=["model.attn_implementation is sdpa", "eager"]),
    Bad(given=["model.architecture.model_type=qwen33"], says=["model.architecture.model_type is qwen33", "qwen3"]),
    Bad(given=["model.architecture.vocab_size=0"], says=["model.architecture.vocab_size is 0"]),
    Bad(given=["model.architecture.vocab_size=10"], says=["model.architecture.vocab_size is 10", "25"]),
    Bad(given=["model.architecture.num_key_value_heads=3"], says=["num_key_value_heads is 3", "divide"]),
    Bad(given=["model.architecture.max_position_embeddings=3"], says=["task.response_length is 3", "3 positions"]),
    Bad(given=["model.path=no-such-org/no-such-model"], says=["model.path", "no-such-org/no-such-model", "cache"]),
    Bad(given=["model.lora.rank=-1"], says=["model.lora.rank is -1"]),
    Bad(given=["model.lora.path=nowhere"], says=["model.lora.path"]),
]

_DATA = [
    Bad(given=["task=jsonl"], says=["task.path has no value"]),
    Bad(given=["task=jsonl", "task.path=no.jsonl"], says=["task.path is", "no.jsonl", "not a file"]),
    Bad(given=JSONL, files={"d.jsonl": ""}, says=["d.jsonl", "is empty"], when="data"),
    Bad(given=JSONL, files={"d.jsonl": b"\xff\xfe\n"}, says=["d.jsonl:1", "UTF-8"], when="data"),
    Bad(given=JSONL, files=jsonl({"prompt": "a", "answer": "b"}, "{"), says=["d.jsonl:2"], when="data"),
    Bad(given=JSONL, files=jsonl([1]), says=["d.jsonl:1", "object"], when="data"),
    Bad(given=JSONL, files={"d.jsonl": '{"n": ' + "[" * 1000}, says=["d.jsonl:1", "200", "column 206"], when="data"),
    Bad(given=JSONL, files={"d.jsonl": f'{{"n": {"9" * 5000}}}'}, says=["d.jsonl:1", "column 7"], when="data"),
    Bad(given=JSONL, files={"d.jsonl": b"BZh91AY"}, says=["d.jsonl", "compressed as bzip2"], when="data"),
    Bad(given=[*JSONL, *MODEL], files={**ROW, **model()}, says=["model.path=m has no tokenizer"], when="data"),
    Bad(
        given=[*JSONL, *MODEL],
        files={**ROW, **model(max_position_embeddings=None)},
        says=["model.path", "config.json has null for max_position_embeddings"],
    ),
    Bad(given=JSONL, files=jsonl({"prompt": "a"}), says=["d.jsonl:1", "'answer'", "it has: 'prompt'"], when="data"),
    Bad(given=JSONL, files=jsonl({"prompt": None, "answer": "b"}), says=["d.jsonl:1", "'prompt' is null"], when="data"),
    Bad(given=JSONL, files=jsonl({"prompt": "", "answer": "b"}), says=["d.jsonl:1", "empty text"], when="data"),
    Bad(given=JSONL, files=jsonl({"prompt": 3, "answer": "b"}), says=["d.jsonl:1", "a number"], when="data"),
    Bad(given=JSONL, files=jsonl({"prompt": [], "answer": "b"}), says=["d.jsonl:1", "empty list"], when="data"),
    Bad(given=JSONL, files=jsonl({"prompt": [{"role": "user"}], "answer": "b"}), says=["d.jsonl:1"], when="data"),
    Bad(given=["task=jsonl", "task.path=d.parquet"], files={"d.parquet": "x"}, says=["d.parquet"], when="data"),
    Bad(
        given=[*JSONL, "task.response_length=8"],
        files=jsonl({"prompt": "hello", "answer": "b"}),
        says=["d.jsonl:1", "no token for 'h'"],
        when="data",
    ),
    Bad(
        given=[*JSONL, "task.prompt_length=3", "task.response_length=8"],
        files=ROW,
        says=["d.jsonl:1", "task.prompt_length"],
        when="data",
    ),
    Bad(
        given=[*JSONL, "task.response_length=8", "task.prompt_length=64"],
        files={"d.jsonl": json.dumps({"prompt": "1" * 50_000_000, "answer": "1"})},
        says=["d.jsonl:1", "task.prompt_length"],
        when="data",
    ),
    Bad(
        given=[*JSONL, "task.response_length=500"],
        files=ROW,
        says=["task.response_length is 500", "positions"],
        when="data",
    ),
    Bad(
        given=["task=pairs", "task.path=d.jsonl"],
        files=jsonl({"prompt": "1", "response": "1"}),
        says=["algorithm=grpo"],
        when="data",
    ),
    Bad(
        given=["algorithm=sft", "task=pairs", "task.path=d.jsonl"],
        files=ROW,
        says=["d.jsonl:1", "'response'"],
        when="data",
    ),
    Bad(given=["task=verl", "task.path=d.jsonl"], files=ROW, says=["d.jsonl:1"], when="data"),
    Bad(given=[*JSONL, "task.reward._target_=null"], files=ROW, says=["task.reward._target_"]),
    Bad(given=[*JSONL, "task.reward=null"], files=ROW, says=["task.reward"]),
    Bad(
        given=[*JSONL, "task.reward._target_=nowhere.f"],
        files=ROW,
        says=["task.reward._target_", "nowhere"],
        when="data",
    ),
    Bad(given=REWARD, files=reward("g = 1\n"), says=["task.reward._target_ is rw.f", "rw has no f"], when="data"),
    Bad(given=REWARD, files=reward("f = 1\n"), says=["task.reward._target_ is rw.f", "callable"], when="data"),
    Bad(
        given=[*JSONL, "task.reward._target_=rw"],
        files=reward("def score(p, r): return 1\n"),
        says=["task.reward._target_ is rw,", "rw is a module; name a function of it: rw.score"],
        when="data",
    ),
    Bad(
        given=[*JSONL, "task.reward._target_=rw.scor"],
        files=reward("def score(p, r): return 1\n"),
        says=["task.reward._target_ is rw.scor,", "did you mean score?"],
        when="data",
    ),
    Bad(
        given=[*JSONL, "task.reward._target_=score"],
        files=ROW,
        says=["task.reward._target_ is score,", "such as my_package.my_module.my_function"],
        when="data",
    ),
    Bad(
        given=REWARD,
        files=reward("class f:\n    def __init__(self, p, r): pass\n"),
        says=["task.reward._target_ is rw.f", "a class; name a function"],
        when="data",
    ),
    Bad(
        given=REWARD,
        files=reward("def f(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"),
        says=["task.reward._target_ is rw.f", "verl's form", "use task=verl task.reward.function_path=", "/rw.py"],
        when="data",
    ),
    Bad(given=REWARD, files=reward("def f(p, r): return 1\n1/0\n"), says=["rw.py:2", "ZeroDivisionError"], when="data"),
    Bad(given=REWARD, files=reward("def f(:\n"), says=["invalid syntax", "rw.py, line 1"], when="data"),
    Bad(given=REWARD, files=reward("import sys\nf = sys.exit(3)\n"), says=["rw.py:2", "sys.exit"], when="data"),
    Bad(given=REWARD, files=reward("def f(p): return 1\n"), says=["rw.f(p)", "a prompt and a response"], when="data"),
    Bad(given=REWARD, files=reward("def f(p, r, x): return 1\n"), says=["rw.f(p, r, x)", "'x'"], when="data"),
    Bad(given=REWARD, files=reward("async def f(p, r): return 1\n"), says=["rw.f", "asynchronous"], when="data"),
    Bad(given=REWARD, files=reward("def f(p, r): yield 1\n"), says=["rw.f", "generator"], when="data"),
    Bad(
        given=[*REWARD, "+task.reward.w=1"],
        files=reward("def f(p, r): return 1\n"),
        says=["rw.f(p, r)", "w"],
        when="data",
    ),
    Bad(given=[*JSONL, "task.reward.on_error=ignore"], files=ROW, says=["task.reward.on_error", "skip"]),
    Bad(given=[*JSONL, "task.reward.timeout_s=0"], files=ROW, says=["task.reward.timeout_s", "0"]),
    Bad(given=[*JSONL, "task.reward.processes=0"], files=ROW, says=["task.reward.processes", "at least 1"]),
    Bad(given=[*JSONL, "task.too_long=drop"], files=ROW, says=["task.too_long is drop", "filter"]),
    Bad(given=[*JSONL, "task.validation.path=v.jsonl"], files=ROW, says=["task.validation.path", "not a file"]),
    Bad(
        given=[*JSONL, "+task.chat_template.thinking=false"],
        files=ROW,
        says=["task.chat_template", "no chat template"],
        when="data",
    ),
    Bad(
        given=["task=verl", "task.path=d.jsonl", "task.reward.function_path=no.py"],
        files=jsonl({"prompt": "1", "data_source": "x", "reward_model": {"ground_truth": "1"}}),
        says=["task.reward.function_path", "no.py"],
        when="data",
    ),
]

_SMALL = ["trainer.steps=2", "task.response_length=8", "task.prompt_length=32"]

_TRIALS = [
    Bad(
        given=[*REWARD, *_SMALL],
        files=reward("def f(p, r):\n    return {}['x']\n"),
        says=["task.reward: the reward function rw.f, called for the first row", "KeyError", "rw.py:2"],
        when="data",
    ),
    Bad(
        given=[*REWARD, *_SMALL],
        files=reward("import sys\n\n\ndef f(p, r):\n    sys.exit(3)\n"),
        says=["task.reward: ", "rw.f", "called sys.exit(3)", "rw.py:5"],
        when="data",
    ),
    Bad(
        given=[*REWARD, *_SMALL, "task.reward.timeout_s=0.3"],
        files=reward("import time\n\n\ndef f(p, r):\n    time.sleep(60)\n"),
        says=["task.reward: ", "did not return within 0.3 s", "rw.py:5"],
        when="data",
    ),
    Bad(
        given=["task=verl", "task.path=d.jsonl", "task.reward.function_path=rw.py", *_SMALL],
        files={
            "rw.py": "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    1 / 0\n",
            **jsonl({"prompt": "1", "data_source": "x", "reward_model": {"ground_truth": "1"}}),
        },
        says=["task.reward: ", "rw.py:compute_score", "ZeroDivisionError", "rw.py:2"],
        when="data",
    ),
]

_RUNS = [
    Bad(given=["cluster.address=127.0.0.1:1"], says=["cluster.address=127.0.0.1:1", "there is no answer"], when="ray"),
]

TABLE: Sequence[Bad] = (*_VALUES, *_MODELS, *_DATA, *_TRIALS)
"""Those that are refused before Ray."""

WITH_RAY: Sequence[Bad] = _RUNS


def _main() -> None:
    """Try all inputs but those that need Ray; print what does not end as it should, and write how long each took."""
    found = []
    for bad in TABLE:
        with tempfile.TemporaryDirectory() as folder:
            outcome = tried(bad, Path(folder))
        lacks = [words for words in bad.says if words not in outcome.said]
        if outcome.code != bad.code or lacks:
            print(f"{bad}: exit code {outcome.code}, lacks {lacks}\n{outcome.said[-600:]}")
        found.append({"input": list(bad.given), "when": bad.when, "seconds": round(outcome.seconds, 3)})
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    _main()
