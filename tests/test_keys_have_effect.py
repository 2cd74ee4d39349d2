"""Every key of what is trained, on what and how changes what a run is built from: a key that nothing reads fails here.

What is built is compared as the values that it holds, for the key as it is and changed; the configuration itself, and
what merely keeps all keys of a node, are left out. The keys come from `conf/`, so a new one needs no entry here, unless
another value of its cannot be made up.
"""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from tests.explorer.helpers import ARCHITECTURE
from trinity_sync import config
from trinity_sync.config import typed
from trinity_sync.explorer.spec import explorer_spec
from trinity_sync.launch.job import Job
from trinity_sync.launch.row_scan import Scanned
from trinity_sync.launch.start import Start
from trinity_sync.models.factory import make_model
from trinity_sync.trainer.spec import worker_spec

ROOT = Path(config.__file__).parents[1]
GROUPS = ("trainer", "algorithm", "samples", "task")
NAMES = ("_target_", "_partial_", "_convert_", "kind")
"""Keys that say which class it is, and how it is built."""

FILE = {"prompt": "a", "answer": "1", "response": "b", "question": "c", "solution": "2", "said": "d"}
CHAT = [{"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}]
OBJECTS = {
    "data_source": "e",
    "reward_model": {"ground_truth": "3"},
    "messages": CHAT,
    "chat": CHAT[::-1],
    "enable": False,
    "kit": [],
}
"""Of each row."""

CLOCK = "_progress"
"""An attribute that says when it was made."""

OTHERS: Mapping[str, Any] = {
    "trainer.betas": [0.5, 0.6],
    "task.path": "other.jsonl",
    "task.validation.path": "other.jsonl",
    "task.prompt_key": "question",
    "task.answer_key": "solution",
    "task.response_key": "said",
    "task.messages_key": "chat",
    "task.tools_key": "kit",
    "task.enable_thinking_key": "enable",
    "task.too_long": "truncate",
    "task.chat_template": {"enable_thinking": False},
    "task.reward.on_error": "zero",
    "task.reward.function_path": "score.py",
    "task.reward.function_name": "another",
    "task.reward.reward_kwargs": {"method": "flexible"},
    "algorithm.kl.reference": "another",
    "algorithm.rollout_correction.rollout_rs": "token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.5_2.0",
}
"""Other values of texts and lists. Of all else one is made up."""

RUNS = {
    "copy_digits": ["task.validation.prompts=4"],
    "jsonl": ["task=jsonl", "task.path=some.jsonl", "task.validation.path=some.jsonl"],
    "free": ["trainer.schedule=free"],
    "sft": ["algorithm=sft", "task=pairs", "task.path=some.jsonl", "task.validation.path=some.jsonl"],
    "verl": ["task=verl", "task.path=some.jsonl", "task.validation.path=some.jsonl"],
    "conversations": ["algorithm=sft", "task=conversations", "task.path=some.jsonl"],
    "compared": ["algorithm.kl.measure=true", "algorithm.overlong.buffer=2"],
}


def keys_of(run: str) -> list[str]:
    values = OmegaConf.to_container(config.compose(RUNS[run]))
    assert isinstance(values, dict)
    return [key for group in GROUPS for key in _leaves(values[group], group)]


def _leaves(node: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}.{name}")
        elif name not in NAMES:
            yield f"{prefix}.{name}"


KEYS = {run: frozenset(keys_of(run)) for run in RUNS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("run")
    for name, lines in {"some.jsonl": 6, "other.jsonl": 7}.items():
        rows = [{key: f"{value}{line}" for key, value in FILE.items()} | OBJECTS for line in range(lines)]
        (made / name).write_text("\n".join(map(json.dumps, rows)))
    (made / "score.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n")
    make_model(ARCHITECTURE, 0, made / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        yield made


def changed(cfg: DictConfig, key: str) -> DictConfig:
    """The same with another value of a key, within its range."""
    found = cfg.copy()
    OmegaConf.update(found, key, OTHERS[key] if key in OTHERS else _other(cfg, key), force_add=True)
    return found


def _other(cfg: DictConfig, key: str) -> Any:
    parent, _, name = key.rpartition(".")
    node, value = OmegaConf.select(cfg, parent), OmegaConf.select(cfg, key)
    schema = OmegaConf.get_type(node)
    limits = schema.__dataclass_fields__[name].metadata if is_dataclass(schema) else {}
    if "choices" in limits:
        return next(choice for choice in limits["choices"] if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) or (value is None and "int" in str(schema.__dataclass_fields__[name].type)):
        return 2 * value if value else 3
    if isinstance(value, float) or (value is None and limits):
        return 0.5 * value if value and 0.5 * value >= limits.get("at_least", 0) else (value or 0) + 0.75
    raise AssertionError(f"{key} is {value!r}; give another value of it in OTHERS")


def built(cfg: DictConfig, folder: Path) -> Any:
    """What the driver makes of a configuration, up to where processes would be started."""
    model = str(folder / "model")
    run = typed(cfg)
    worker = worker_spec(run, model, "logs")
    algorithm = worker.algorithm
    loss = algorithm.loss(cfg.backend.strategy)
    closure = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    parts = [vars(worker) | {"algorithm": None}, algorithm.recomputes, algorithm.needs_entropy, loss, closure]
    if algorithm.explores:
        explorer = explorer_spec(run, model, "logs")
        parts += [vars(explorer) | {"task": None, "member": None}]
    task, validating = config.build_task(cfg.task, cfg.seed), config.validation_task(cfg)
    asked = () if validating is None else config.validation_items(cfg, validating)
    return content([*parts, task, loop_of(cfg, model, Scanned(task, None, asked))])


def loop_of(cfg: DictConfig, model: str, scanned: Scanned) -> Any:
    job = Job.__new__(Job)
    free = cfg.trainer.schedule == "free"
    explores = cfg.algorithm.kind != "sft"
    pool = SimpleNamespace(clients={"explorer-0": None}) if explores else None
    job._scanned = scanned
    job._cfg, job._last_step, job._stop = cfg, cfg.trainer.steps, threading.Event()
    job._recorder = SimpleNamespace(attempt=0, fault=None)  # type: ignore[assignment]
    job._folder = SimpleNamespace(metrics=Path("metrics.jsonl"))  # type: ignore[assignment]
    job._start = Start(0, False, Path("checkpoints"), None)
    nothing = dict.fromkeys(("trainer", "synchronizer", "published_base"))
    job.actors = SimpleNamespace(**nothing, infos=[], pool=pool, explores=explores, free=free, model_path=model)  # type: ignore[assignment]
    return job._make_loop(None, None, None)  # type: ignore[arg-type]


def content(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The plain values in something, through all that is ours; of anything else its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in above:
        return "itself"
    inside = partial(content, above=(*above, id(value)))
    if isinstance(value, Mapping):
        return {str(key): inside(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [inside(item) for item in value]
    if isinstance(value, partial):
        return [inside(value.func), inside(value.args), inside(value.keywords)]
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, np.ndarray):
        return value.tolist()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": kind} | {each.name: inside(getattr(value, each.name, None)) for each in fields(value)}
    if kind.startswith("trinity_sync."):
        return {"is": kind} | {name: inside(item) for name, item in vars(value).items() if name != CLOCK}
    return kind


@cache
def unchanged(run: str, folder: Path) -> Any:
    return built(config.compose(RUNS[run]), folder)


@cache
def read_in_trainer() -> frozenset[str]:
    """Names of attributes that the code of trainer ranks reads. They have the algorithm's keys, all of them."""
    files = (ROOT / "trainer").rglob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))


def has_effect(key: str, run: str, folder: Path) -> bool:
    cfg = config.compose(RUNS[run])
    if built(changed(cfg, key), folder) != unchanged(run, folder):
        return True
    return key.startswith("algorithm.") and key.rpartition(".")[2] in read_in_trainer()


@pytest.mark.parametrize("key", sorted(frozenset().union(*KEYS.values())))
def test_a_key_changes_what_a_run_is_built_from(key: str, folder: Path) -> None:
    assert any(has_effect(key, run, folder) for run in RUNS if key in KEYS[run]), f"{key} changes nothing"


@pytest.mark.parametrize("run", RUNS)
def test_of_the_same_the_same_is_built_so_a_dead_key_is_found(run: str, folder: Path) -> None:
    assert built(config.compose(RUNS[run]), folder) == unchanged(run, folder)
    assert built(config.compose([*RUNS[run], "+samples.dead=1", "+trainer.dead=1"]), folder) == unchanged(run, folder)
