"""Every key of what is trained, on what and how changes what a run is built from: a key that nothing reads fails here.

What is built is compared as the values that it holds, for the key as it is and changed; the configuration itself, and
what merely keeps all keys of a node, are left out. An algorithm keeps them all, so of those it is what comes of a
step: loss, gradient and metrics on made-up log-probs. The keys come from `conf/`, so a new one needs no entry here,
unless another value of its cannot be made up, or it matters in no run of `RUNS`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

from tests.explorer.helpers import ARCHITECTURE
from tests.trainer.losses import LENGTHS, drawn, jagged, step
from trinity_sync import config
from trinity_sync.config import Config, typed
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.actor import explorer_spec
from trinity_sync.launch.job import Job
from trinity_sync.launch.row_scan import ScannedTask
from trinity_sync.launch.sample_source import sample_journal
from trinity_sync.launch.start import Start
from trinity_sync.models.architecture import make_model
from trinity_sync.protocol.parts import VersionBytes
from trinity_sync.trainer.algorithms.grpo import Grpo
from trinity_sync.trainer.worker import adapted, divergences
from trinity_sync.trainer.worker_spec import WorkerSpec, worker_spec

GROUPS = ("trainer", "algorithm", "samples", "task")
NAMES = ("_target_", "_partial_", "_convert_", "kind", "total_epochs", "max_restarts", "restart_window_s")
"""Keys that say which class it is, and how it is built; `tests.launch` has the last three (`test_total_epochs`,
`test_healing`).
"""

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

NOW, SAMPLED, BEFORE, REFERENCE = (drawn(seed, 4.0) for seed in (1, 2, 3, 4))
"""Log-probs of the tokens of a step: those of the policy, and of those before it."""
AGES = [np.arange(response) for _, response in LENGTHS]

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
    "algorithm.old_log_probs": "recomputed",
    "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.9_1.1",
    "algorithm.kl.in_reward.estimator": "k3",
}
"""Other values of texts and lists. Of all else one is made up."""

CORRECTION, LOSS = "algorithm.rollout_correction.rollout", "algorithm.policy_loss"
RUNS = {
    "copy_digits": ["task.validation.prompts=4"],
    "jsonl": ["task=jsonl", "task.path=some.jsonl", "task.validation.path=some.jsonl"],
    "free": ["trainer.schedule=free"],
    "sampled": ["task.validation.prompts=4", "task.validation.temperature=1"],
    "sft": ["algorithm=sft", "task=pairs", "task.path=some.jsonl", "task.validation.path=some.jsonl"],
    "verl": ["task=verl", "task.path=some.jsonl", "task.validation.path=some.jsonl"],
    "conversations": ["algorithm=sft", "task=conversations", "task.path=some.jsonl"],
    "compared": ["algorithm.kl.coeff=0.1", "algorithm.overlong.buffer=2"],
    "corrected": [f"{CORRECTION}_is=token", f"{CORRECTION}_rs=token_k1", f"{CORRECTION}_rs_threshold='0.5_2.0'"],
    "dr_grpo": ["algorithm.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.loss_scale_factor=8"],
    "clip_cov": [
        "algorithm.loss_mode=clip_cov",
        *(f"{LOSS}.clip_cov_{key}" for key in ("ratio=0.4", "lb=-4", "ub=-0.8")),
    ],
    "kl_cov": ["algorithm.loss_mode=kl_cov", f"{LOSS}.kl_cov_ratio=1"],
    "dro": ["algorithm.loss_mode=dro"],
    "sapo": ["algorithm.loss_mode=sapo", "algorithm.loss_agg_mode=seq-mean-token-mean"],
    "filtered": ["algorithm.filter_groups.enable=true"],
    "adaptive": ["algorithm.kl.in_reward.coeff=1", "algorithm.kl.in_reward.type=adaptive"],
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
    parts = [vars(worker) | {"algorithm": None}, algorithm.recomputes, algorithm.needs_entropy]
    if algorithm.explores:
        explorer = explorer_spec(run, model, "logs")
        parts += [vars(explorer) | {"task": None, "member": None}]
    task, validating = config.build_task(cfg.task, cfg.seed), config.validation_task(cfg)
    asked = () if validating is None else config.validation_items(cfg, validating)
    return content([*parts, task, loop_of(run, model, ScannedTask(task, None, asked)), trained(worker)])


def trained(spec: WorkerSpec) -> Any:
    """What comes of a step with the algorithm of a rank: of samples that are far off the policy, some of them longer
    ago. Of supervised training nothing, whose loss has no keys.
    """
    algorithm = spec.algorithm
    if not algorithm.explores:
        return None
    torch.manual_seed(0)
    penalty = None
    if (asked := algorithm.in_reward) is not None:
        rows = {
            "response_mask": [np.ones_like(row) for row in BEFORE],
            "old_log_probs": BEFORE,
            "ref_log_prob": REFERENCE,
        }
        data = TensorDict({name: jagged(of) for name, of in rows.items()}, batch_size=len(BEFORE))
        measured = divergences(data, np.arange(len(BEFORE)), asked.estimator)
        assert measured is not None
        penalty = [*measured.sums, adapted(1.0, 0.09, 8, asked) if asked.type == "adaptive" else 0.0]
    return penalty, step(
        algorithm.loss(spec.backend.strategy),
        NOW,
        SAMPLED,
        BEFORE if algorithm.recomputes else None,
        reference=None if spec.reference is None else REFERENCE,
        staleness=AGES,
        entropy=algorithm.needs_entropy,
    )


def loop_of(cfg: Config, model: str, scanned: ScannedTask) -> Any:
    job = Job.__new__(Job)
    free = cfg.trainer.schedule == "free"
    explores = cfg.algorithm.kind != "sft"
    pool = SimpleNamespace(clients={"explorer-0": None}, work_limit=lambda more_s=0.0: more_s) if explores else None
    folder = SimpleNamespace(metrics=Path("metrics.jsonl"), path=Path(model).parent)
    job._cfg = cfg
    job._recorder = SimpleNamespace(attempt=0, event=None, fault=None)  # type: ignore[assignment]
    job._setup = SimpleNamespace(  # type: ignore[assignment]
        cfg=cfg,
        scanned=scanned,
        last_step=cfg.trainer.steps,
        stop=threading.Event(),
        folder=folder,
        recorder=job._recorder,
        owner=SimpleNamespace(run="run"),
        samples_digest="",
    )
    job._start = Start(0, False, Path("checkpoints"), None)
    nothing = dict.fromkeys(("trainer", "synchronizer", "published_base"))
    job.actors = SimpleNamespace(  # type: ignore[assignment]
        **nothing,
        infos=[],
        version_bytes=VersionBytes(),
        pool=pool,
        explores=explores,
        free=free,
        keeps=True,
        memory_monitor=None,
        model_path=model,
    )
    journal = sample_journal(job._setup, explores=explores)
    return [job._make_loop(None, None, None, None), journal]  # type: ignore[arg-type]


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
    if isinstance(value, np.number | torch.Tensor):
        return value.item()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": kind} | {each.name: inside(getattr(value, each.name, None)) for each in fields(value)}
    if kind.startswith("trinity_sync."):
        return {"is": kind} | {name: inside(item) for name, item in vars(value).items() if name != CLOCK}
    return kind


@cache
def composed(run: str) -> DictConfig:
    return config.compose(RUNS[run])


@cache
def unchanged(run: str, folder: Path) -> Any:
    return built(composed(run), folder)


def has_effect(key: str, run: str, folder: Path) -> bool:
    other = changed(composed(run), key)
    try:
        config.check(other)
    except ConfigError:
        return False  # with another one of this run's keys it cannot be
    return bool(built(other, folder) != unchanged(run, folder))


@pytest.mark.parametrize("key", sorted(frozenset().union(*KEYS.values())))
def test_a_key_changes_what_a_run_is_built_from(key: str, folder: Path) -> None:
    assert any(has_effect(key, run, folder) for run in RUNS if key in KEYS[run]), f"{key} changes nothing"


@pytest.mark.parametrize("run", RUNS)
def test_of_the_same_the_same_is_built_so_a_dead_key_is_found(run: str, folder: Path) -> None:
    assert built(config.compose(RUNS[run]), folder) == unchanged(run, folder)
    assert built(config.compose([*RUNS[run], "+samples.dead=1", "+trainer.dead=1"]), folder) == unchanged(run, folder)


@dataclass(kw_only=True)
class Careless(Grpo):
    """A key that nobody reads. Its name is that of an attribute that ranks do read, of something else."""

    rank: int = 0


def test_a_key_of_an_algorithm_that_nobody_reads_is_found(folder: Path) -> None:
    one, two = (
        config.compose([f"+algorithm.rank={rank}", f"algorithm._target_={__name__}.Careless"]) for rank in (1, 2)
    )
    assert [vars(typed(cfg).algorithm)["rank"] for cfg in (one, two)] == [1, 2]
    assert built(one, folder) == built(two, folder)
