"""Real Megatron engines in processes of their own: what `test_megatron.py` asks of them, gathered in one start.

All layouts of one number of ranks run in the same processes, one after the other; megatron-core's groups are taken down
in between. `engines.Ranks` starts them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from tests.backends.engines import _digest as digest
from tests.backends.engines import _facts_file as facts_file
from tests.backends.engines import _step as step
from tests.backends.engines import drawn_pairs, join_group, refused, text_of_files
from tests.backends.gradients import decays, gradients, passing_over
from tests.backends.recomputing import recomputing
from trinity_sync.host.durable import digest_file
from trinity_sync.protocol.parts import FileTuple

VOCABULARY = 37  # no multiple of anything: the engines pad it


def make_models(folder: Path) -> None:
    """Small models of the supported families, and a tokenizer beside each."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    from trinity_sync.models.architecture import character_tokenizer

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.02,
    }
    for name, config, model, tied in (
        ("qwen3", Qwen3Config, Qwen3ForCausalLM, False),
        ("qwen3-tied", Qwen3Config, Qwen3ForCausalLM, True),
        ("qwen2", Qwen2Config, Qwen2ForCausalLM, False),
        ("llama-tied", LlamaConfig, LlamaForCausalLM, True),
        ("experts", Qwen3MoeConfig, Qwen3MoeForCausalLM, False),
        ("experts-of-all", Qwen3MoeConfig, Qwen3MoeForCausalLM, False),
    ):
        torch.manual_seed(3)
        fields = {**sizes, "tie_word_embeddings": tied}
        if name == "qwen2":
            del fields["head_dim"]
        if model is Qwen3MoeForCausalLM:  # their weights are of the chosen ones, or of all
            fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            fields["norm_topk_prob"] = name == "experts"
        made = model(config(**fields))
        for parameter in made.parameters():  # transformers begins norms with ones and biases with zeros
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.1)
        made.to(torch.bfloat16).save_pretrained(folder / name)
        character_tokenizer(VOCABULARY).save_pretrained(folder / name)


def run(
    rank: int, ranks: int, port: int, folder: Path, cases: list[Mapping[str, Any]], saved: Mapping[str, Any]
) -> None:
    """One process. A case has `world` ranks (the first ones), `tp`, `pp`, `ep`, `model`, and what it does: `do`."""
    import warnings

    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    import trinity_sync.backends.lean_verl  # noqa: F401

    raises = _what_raises_without_cuda()
    from trinity_sync.backends.megatron import cpu, megatron_engine

    used = _count_calls(cpu.STAND_INS)
    megatron_engine.prepare()
    models = folder / "models"
    if rank == 0 and not models.exists():
        make_models(models)
    facts: list[dict[str, Any]] = []
    for world in sorted({case["world"] for case in cases}, reverse=True):
        mine = [case for case in cases if case["world"] == world]
        if rank >= world:
            facts += [{} for _ in mine]
            continue
        join_group(port, rank, world)
        dist.barrier()
        facts += [{**_case(case, models, folder), "cuda": torch.cuda.is_available()} for case in mine]
        dist.barrier()
        dist.destroy_process_group()
    for of_case in facts:
        of_case |= {"raised": raises, "used": sorted(used)}
    facts_file(folder, ranks, rank).write_text(json.dumps(facts))


def _what_raises_without_cuda() -> list[str]:
    """The names of the stand-ins whose originals fail on this machine."""
    import importlib

    import torch

    from trinity_sync.backends.megatron.cpu import STAND_INS

    found = []
    for name in STAND_INS:
        module, _, attribute = name.rpartition(".")
        original = getattr(importlib.import_module(module), attribute)
        state = torch.get_rng_state()
        torch.manual_seed(77)
        before = torch.get_rng_state()
        try:
            if name.endswith("_set_cuda_rng_state"):
                original(state)
                if torch.equal(torch.get_rng_state(), before):
                    raise RuntimeError("had no effect")
            elif name.endswith("manual_seed"):
                original(1)
                if torch.equal(torch.get_rng_state(), before):
                    raise RuntimeError("had no effect")
            else:
                original()
        except (AssertionError, RuntimeError):
            found.append(name)
        finally:
            torch.set_rng_state(state)
    return sorted(found)


def _count_calls(stand_ins: dict[str, Any]) -> set[str]:
    """Replace each stand-in by one that leaves its name in the set."""
    used: set[str] = set()

    def counting(name: str, stand_in: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            used.add(name)
            return stand_in(*args, **kwargs)

        return call

    for name, stand_in in list(stand_ins.items()):
        stand_ins[name] = counting(name, stand_in)
    return used


def build(case: Mapping[str, Any], models: Path) -> Any:
    """The engine of a case."""
    from megatron.core import parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    parallel_state.destroy_model_parallel()
    late = case.get("overlap_param_gather", False)
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    engine = EngineRegistry.new(
        "language_model",
        "megatron",
        model_config=HFModelConfig(path=str(models / case["model"])),
        engine_config=McoreEngineConfig(
            tensor_model_parallel_size=case["tp"],
            pipeline_model_parallel_size=case["pp"],
            expert_model_parallel_size=case.get("ep", 1),
            vanilla_mbridge=True,
            use_remove_padding=False,
            dist_ckpt_optim_fully_reshardable=case.get("format", "fully_reshardable") == "fully_reshardable",
            override_ddp_config={"overlap_param_gather": late, "overlap_grad_reduce": late},
            override_transformer_config={
                "masked_softmax_fusion": False,
                "gradient_accumulation_fusion": False,
                "persist_layer_norm": False,
                "sequence_parallel": case.get("sequence_parallel", case["tp"] > 1),
                **(again if case.get("recompute") else {}),
            },
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=case.get("lr", 1e-2),
            weight_decay=case.get("weight_decay", 1e-2),
            total_training_steps=20,
            lr_warmup_steps=2,
            lr_decay_style="cosine",
            use_checkpoint_opt_param_scheduler=case.get("schedule_of_checkpoint", False),
            override_optimizer_config={
                "overlap_param_gather": late,
                "adam_beta1": case.get("beta", 0.9),
                "loss_scale": 1.0,
            },
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def _case(case: Mapping[str, Any], models: Path, folder: Path) -> dict[str, Any]:
    from trinity_sync.backends.megatron.backend import MegatronBackend

    engine = build(case, models)
    backend = MegatronBackend(engine, "BF16")
    facts: dict[str, Any] = {}
    for action in case["do"]:
        facts |= _ACTIONS[action](case, engine, backend, models, folder)
    return facts


def meetings(timeout_s: float = 60.0) -> Any:
    from trinity_sync.backends.meetings import Meetings

    return Meetings.of_default_group(timeout_s)


def _train(engine: Any, number: int) -> dict[str, Any]:
    return step(engine, engine.get_data_parallel_rank(), number)


def _version(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """The initial version, and the one after a step, against mbridge's own export."""
    from safetensors.torch import load_file

    from trinity_sync.backends.megatron.optimizer_state import inner_optimizers
    from trinity_sync.weights.tensors import state_digest

    file = load_file(models / case["model"] / "model.safetensors")
    facts = {"file": state_digest(file, "BF16"), "initial": digest(backend, case["world"])}
    facts["refused"] = refused(backend, "megatron", case["world"])
    facts |= _log_probs(engine, models / case["model"])
    facts["gradients"], facts["decays"] = gradients(engine, models / case["model"]), decays(engine)
    # the learning rate warms up from 0, so the first step changes nothing
    facts["gradient"] = _train(engine, 0).get("grad_norm")
    facts["wanted_gradient"] = _gradient_norm(models / case["model"], engine.get_data_parallel_size())
    facts["clipped_of_experts"] = _clipped_of_experts(engine)
    facts["passed_over"] = passing_over(engine, lambda: digest(backend, case["world"]))
    _train(engine, 1)
    facts["after_step"] = digest(backend, case["world"])
    facts["saves_scale"] = ["grad_scaler" in one.state_dict() for one in inner_optimizers(engine.optimizer)]
    exported = {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}
    facts["exported"] = state_digest({name: exported[name] for name in file}, "BF16")
    facts["recomputing"] = recomputing(engine)
    return facts


def _log_probs(engine: Any, model: Path) -> dict[str, Any]:
    """The largest difference of a log-prob from transformers' in float32, on the rank that has the output."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from verl.utils import tensordict_utils as tu

    from trinity_sync.trainer.training_batch import sft_batch

    draw = np.random.default_rng(engine.get_data_parallel_rank())
    lengths = ((5, 9), (12, 3), (7, 7), (2, 11))
    pairs = [(draw.integers(3, VOCABULARY, a), draw.integers(3, VOCABULARY, b)) for a, b in lengths]
    data = sft_batch([a for a, _ in pairs], [b for _, b in pairs], micro_batch=2, global_mini_batch=4)
    tu.assign_non_tensor(data, calculate_entropy=True)
    with engine.eval_mode():
        output = engine.infer_batch(data, None)
    if not engine.is_mp_src_rank_with_outputs():
        return {}
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    worst = 0.0
    for index, (prompt, answer) in enumerate(pairs):
        ids = torch.from_numpy(np.concatenate([prompt, answer]))
        with torch.no_grad():
            wanted = reference(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        found = output["model_output"]["log_probs"][index][: len(ids) - 1].float()
        worst = max(worst, (wanted - found).abs().max().item())
    entropy = output["model_output"]["entropy"].values()
    return {"log_probs": worst, "finite": bool(torch.isfinite(entropy).all())}


def _clipped_of_experts(engine: Any) -> float:
    """Norm of the clipped gradients of experts in the first step, as Adam's first average has them; 0 without experts.
    Collective.
    """
    import torch
    import torch.distributed as dist

    squares = torch.zeros(())
    for one in getattr(engine.optimizer, "chained_optimizers", [])[1:]:
        states = one.optimizer.state.values()
        squares += sum(state["exp_avg"].square().sum() for state in states) / (1 - one.config.adam_beta1) ** 2
    dist.all_reduce(squares)
    return float(squares.sqrt())


def _gradient_norm(model: Path, ranks: int) -> tuple[float, float]:
    """Of the first step of all data-parallel ranks, by transformers in float32; and that of experts alone."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    pairs = [pair for rank in range(ranks) for pair in drawn_pairs(0, rank)]
    for prompt, answer in pairs:
        ids = torch.from_numpy(np.concatenate([prompt, answer]))
        log_probs = reference(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])
        (-log_probs[-len(answer) :].sum() / sum(len(answer) for _, answer in pairs)).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    of_experts = [gradient for name, gradient in gradients.items() if ".experts." in name]
    norm = torch.nn.utils.get_total_norm
    return float(norm(gradients.values())), float(norm(of_experts))


def _save(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """Save in the background while a step trains, then resume: the same step once more."""
    import numpy as np
    import torch

    from trinity_sync.backends.megatron.backend import MegatronBackend
    from trinity_sync.checkpoint.reading import open_weights

    torch.manual_seed(100 + torch.distributed.get_rank())
    np.random.seed(7)
    saved = folder / case["save"]
    facts = {"before_save": digest(backend, case["world"])}
    with _copied_late() as reached:
        copying, write = backend.begin_save(saved, meetings().begin("the state"), lazily=True)
    facts["rng_saved"] = _rng()
    backend.before_change(reached.set)
    backend.before_change(lambda: copying.wait_until_copied(60))
    files: list[Path | FileTuple] = []
    writer = threading.Thread(target=lambda: files.extend(write()))
    writer.start()
    _train(engine, 2)
    writer.join(60)
    assert not writer.is_alive(), "the save does not end"
    if torch.distributed.get_rank() == 0:
        facts["read"] = open_weights(saved).digest("BF16")
        facts["came"] = text_of_files(Path(engine.model_config.local_path))
        facts["beside"] = text_of_files(saved / "model" / "huggingface")
    known = {file[0]: file[1:] for file in files if isinstance(file, tuple)}
    assert known == {name: digest_file(saved / name) for name in known}
    facts["files"] = sorted([*known, *(str(path.relative_to(saved)) for path in files if isinstance(path, Path))])
    facts["next"], facts["next_state"] = digest(backend, case["world"]), _optimizer_hash(engine)
    facts["lr_next"] = engine.optimizer.param_groups[0]["lr"]

    torch.manual_seed(999)
    own = _rng()
    MegatronBackend(engine, "BF16", restore_rng=False).load(saved)
    facts["rng_kept"] = _rng() == own
    facts["persistent_buffers"] = [
        name for chunk in engine.module for name in chunk.state_dict() if name in dict(chunk.named_buffers())
    ]
    backend.load(saved)
    facts["loaded"], facts["rng_loaded"] = digest(backend, case["world"]), _rng()
    _train(engine, 2)
    facts["next_after_load"], facts["next_state_after_load"] = digest(backend, case["world"]), _optimizer_hash(engine)
    facts["lr_next_after_load"] = engine.optimizer.param_groups[0]["lr"]

    second = folder / f"{case['save']}-second"
    copying_second, write_second = backend.begin_save(second, meetings().begin("the second state"), lazily=True)
    backend.before_change(lambda: copying_second.wait_until_copied(60))
    writer = threading.Thread(target=write_second)
    writer.start()
    _train(engine, 3)
    writer.join(60)
    assert not writer.is_alive(), "the second save does not end"
    torch.distributed.barrier()
    facts["after_second"] = digest(backend, case["world"])
    backend.load(second)
    facts["second_loaded"], facts["second_state"] = digest(backend, case["world"]), _optimizer_hash(engine)
    return facts


@contextmanager
def _copied_late() -> Iterator[threading.Event]:
    """What is copied lazily begins to be copied when the event is set: training has reached the optimizer by then."""
    from trinity_sync.weights.staging import TensorCopy

    copy, reached = TensorCopy._copy, threading.Event()

    def copy_late(self: TensorCopy) -> None:
        reached.wait()
        copy(self)

    TensorCopy._copy = copy_late  # type: ignore[method-assign]
    try:
        yield reached
    finally:
        TensorCopy._copy = copy  # type: ignore[method-assign]


def _load(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """Load what another layout saved, and save it again."""
    import torch.distributed as dist

    backend.load(folder / case["load"])
    groups = [group for group in engine.optimizer.param_groups if group["params"]]
    facts = {"loaded": digest(backend, case["world"]), "lr": groups[0]["lr"]}
    facts["settings"] = [[group["lr"], group["betas"][0], group["weight_decay"]] for group in groups]
    again = folder / f"{case['load']}-again-{case['tp']}-{case['pp']}-{case.get('ep', 1)}-{case['world']}"
    backend.begin_save(again, meetings().begin("the state"))[1]()
    dist.barrier()
    spans = [
        sorted(
            span[:2] for chunk in engine.module for buffer in of(chunk)[:1] for span in buffer.param_index_map.values()
        )
        for of in (attrgetter("buffers"), attrgetter("expert_parallel_buffers"))
    ]
    facts["contents"] = checkpoint_hashes(again, *spans)
    facts["contents_loaded"] = checkpoint_hashes(folder / case["load"], *spans)
    return facts


def _poisoned(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """Load checkpoints in each of which one file has been made to run something: what was said, and whether it ran."""
    import shutil

    import torch

    from tests.backends.test_safe_loading import Evil, spoil_metadata, spoil_object

    sound, mark = folder / "sound", folder / "mark"
    backend.begin_save(sound, meetings().begin("the state"))[1]()
    spoilt: dict[str, list[Any]] = {}

    def attempt(name: str, spoil: Any) -> None:
        copy = folder / "spoilt"
        shutil.copytree(sound, copy)
        spoil(copy)
        try:
            backend.load(copy)
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        spoilt[name] = [said, mark.exists()]
        mark.unlink(missing_ok=True)
        shutil.rmtree(copy)

    for tree in ("model", "optimizer", "extra"):
        place = f"{tree}/dist_ckpt"
        attempt(f"{place}/.metadata", lambda copy, place=place: spoil_metadata(copy / place, mark))
        common = f"{place}/common.pt"
        attempt(common, lambda copy, common=common: torch.save({"x": Evil(mark)}, copy / common))
    attempt("an object in extra/dist_ckpt", lambda copy: spoil_object(copy / "extra/dist_ckpt", mark))
    backend.load(sound)
    return {"poisoned": spoilt, "sound": True}


def _late(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """Versions taken between steps, and while the model is offloaded, are those of a run that takes none."""
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

    from trinity_sync.backends.megatron.cpu import CudaMeansCpu

    facts: dict[str, Any] = {"deadline": backend.deadline}
    found = []
    for number in range(3):
        _train(engine, number)
        if number % 2 == 0:
            found.append(digest(backend, case["world"]))
    facts["versions"] = found
    with CudaMeansCpu():
        offload_megatron_model_to_cpu(engine.module)
    facts["offloaded"] = digest(backend, case["world"])
    facts["storage"] = engine.module[0].buffers[0].param_data.untyped_storage().size()
    with CudaMeansCpu():
        load_megatron_model_to_gpu(engine.module)
    _train(engine, 3)
    facts["after_offload"] = digest(backend, case["world"])
    return facts


def _failing(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """Saves that one rank cannot write or copy, comes late to, or gives up before it writes; one after each."""
    import torch.distributed as dist

    from trinity_sync.errors import RunError

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    own = meetings()
    told, after = {}, []

    def save(name: str) -> int:
        meeting = own.begin(name)
        copying, write = backend.begin_save(folder / name, meeting)
        if rank == last and name == "torn":
            (folder / name / "model" / "dist_ckpt" / f"__{last}_0.distcp").mkdir(parents=True)
        if rank == last and name == "not-copied":
            copying._error = RuntimeError("out of memory")
        if rank == last and name == "no-turn":
            meeting.give_up(RunError("the monitor is gone"))
            raise RunError("no turn")
        if rank == last and name == "late":
            store = dist.distributed_c10d._get_default_store()
            assert store.get("the others gave up")
        return len(write())

    (folder / "no-folder").write_text("in the way")
    for name in ("torn", "not-copied", "no-turn", "no-folder", "late"):
        own.timeout_s = 0.5 if name == "late" and rank != last else 60.0
        try:
            save(name)
        except RunError as error:
            told[name] = str(error)
        if name == "late" and rank != last:
            dist.distributed_c10d._get_default_store().set("the others gave up", "yes")
        own.timeout_s = 60.0
        after.append(save(f"after-{name}"))
    return {"told": told, "after": after}


def _refusals(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """What the bridges say to models they do not know, and to a GPU without Transformer Engine."""
    import logging
    from unittest import mock

    import torch
    from transformers import GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig
    from verl.utils.megatron_utils import unwrap_model

    from trinity_sync.backends.megatron import bridges
    from trinity_sync.backends.megatron.backend import MegatronBackend
    from trinity_sync.errors import ConfigError

    said = []
    scaled = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    for check, config in (
        (bridges.check_architecture, GPT2Config()),
        (bridges.check_architecture, LlamaConfig(attention_bias=True)),
        (bridges.check_architecture, Qwen3Config(hidden_act="gelu")),
        (bridges.rotary_arguments, LlamaConfig(rope_parameters=scaled)),
        (lambda config: bridges.check_experts(config, 3), Qwen3MoeConfig(num_experts=4)),
        (lambda config: bridges.check_experts(config, 2), LlamaConfig()),
        (bridges.check_architecture, Qwen3MoeConfig(mlp_only_layers=[0])),
    ):
        try:
            check(config)
        except ConfigError as error:
            said.append(str(error))
    chunk = unwrap_model(engine.module[0]).decoder
    chunk.register_parameter("unknown_weight", torch.nn.Parameter(torch.ones(2)))
    try:
        MegatronBackend(engine, "BF16")
    except ConfigError as error:
        said.append(str(error))
    del chunk.unknown_weight
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    known = LlamaConfig(rope_parameters={**llama3, "original_max_position_embeddings": 8192})
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(bridges.__name__).addHandler(handler)
    bridges.has_transformer_engine.cache_clear()
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        found = [bridges.has_transformer_engine() for _ in range(2)]
    bridges.has_transformer_engine.cache_clear()
    return {"said": said, "llama3": bridges.rotary_arguments(known), "te": found, "warnings": warnings}


def _functions(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """The functions for verl programs: a save of the model alone, an upload, a broadcast to the last rank."""
    import logging

    import torch.distributed as dist
    from safetensors.torch import load_file

    from trinity_sync.errors import RunError
    from trinity_sync.integrations import verl
    from trinity_sync.weights.tensors import state_digest

    log, kept = logging.getLogger("test"), list(load_file(models / case["model"] / "model.safetensors"))
    calls: list[Any] = []
    reported: list[str] = []

    staged = folder / "staged" / "actor"

    class Coordinator:
        committed = False

        def staged(self, local_path: str, step: int) -> Path:
            return staged

        def is_saved(self, part: str, step: int) -> bool:
            return self.committed

        def part(self, local_path: str, step: int, name: str) -> str:
            return f"actor/{name}"

        def announce(self, step: int, parts: Any, is_state_dict: bool) -> None:
            assert len(parts) == dist.get_world_size()

        def save_sync(self, save: Any, step: int, is_state_dict: bool, *, part: str) -> None:
            calls.append((step, is_state_dict, part))
            reported.extend(str(path) for path in save())

    class Synchronizer:
        def set_model_state_dict(self, pairs: Any, step: int, *, attempt: int, wire_dtype: str | None) -> None:
            state = {name: tensor.clone() for name, tensor in pairs}
            calls.append((step, state_digest({name: state[name] for name in kept}, "BF16"), len(state) - len(kept)))
            assert (attempt, wire_dtype) == (2, "BF16")

    class Refusing(Coordinator):
        """The last rank gets no turn, and rank 0's Synchronizer takes one tensor."""

        def save_sync(self, save: Any, *args: Any, **kwargs: Any) -> None:
            if dist.get_rank() == dist.get_world_size() - 1:
                raise RunError("no turn")
            save()

        def set_model_state_dict(self, pairs: Any, step: int, **kwargs: Any) -> None:
            next(iter(pairs))
            raise RunError("no room")

    class Broken:
        """The last rank cannot bring the model to the device."""

        def get_per_tensor_param(self) -> Any:
            if dist.get_rank() == dist.get_world_size() - 1:
                raise RuntimeError("out of memory")
            return engine.get_per_tensor_param()

    manager = engine.checkpoint_mananager
    contents = list(manager.checkpoint_save_contents)
    place, coordinator = folder / "by-verl" / "actor", Coordinator()
    if dist.get_rank() == 0:
        staged.mkdir(parents=True)
    dist.barrier()
    verl.megatron_save_state_dict(engine, None, 3, coordinator, log)
    manager.use_dist_checkpointing = False  # as verl has it by default
    paths = list(manager.previous_saved_paths)
    verl.megatron_save_state_dict(engine, str(place), 3, coordinator, log)
    facts: dict[str, Any] = {"contents_after": manager.checkpoint_save_contents == contents}
    facts["left_to_us"] = manager.previous_saved_paths == paths and not place.exists()

    def files() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in staged.rglob("*") if path.is_file()}

    written, coordinator.committed = files(), True
    verl.megatron_save_state_dict(engine, str(place), 3, coordinator, log)
    facts["again"] = files() == written
    facts["reported"], facts["written"] = reported, sorted(written)
    place = staged
    facts["saved"] = sorted({path.relative_to(place).parts[0] for path in place.rglob("*") if path.is_file()})
    facts["saved_digest"] = state_digest(
        {
            name: tensor
            for name, tensor in load_file(place / "model/huggingface/model.safetensors").items()
            if name in kept
        },
        "BF16",
    )

    facts["failures"] = []
    for call in (
        lambda: verl.megatron_save_state_dict(engine, str(place), 3, Refusing(), log),
        lambda: verl.megatron_upload_state_dict(engine, Refusing(), 3, log),
        lambda: verl.megatron_upload_state_dict(Broken(), Synchronizer(), 3, log),
        lambda: verl.megatron_sync_weight_nccl(Broken(), None),
    ):
        try:
            call()
        except RunError as error:
            facts["failures"].append(str(error))
    verl.megatron_upload_state_dict(engine, Synchronizer(), 0, log)
    verl.megatron_upload_state_dict(engine, Synchronizer(), 4, log, attempt=2, wire_dtype="BF16")
    facts["calls"] = calls
    facts["digest"] = digest(backend, case["world"])
    meta = verl.megatron_state_dict_meta(engine, wire_dtype="BF16")
    facts["meta"] = sorted(name for name, _, _ in meta)
    facts["received"] = _received(engine, verl.megatron_sync_weight_nccl, kept)
    facts["kept"] = sorted(kept)
    return facts


def _received(engine: Any, send: Any, kept: list[str]) -> str | None:
    """Broadcast to a thread of the last rank, which plays the explorer; digest of what it got."""
    import torch
    import torch.distributed as dist

    from trinity_sync.weights.tensors import state_digest

    last = dist.get_world_size() - 1
    group = dist.new_group([0, last])
    named = {name: torch.zeros_like(tensor) for name, tensor in engine.get_per_tensor_param()[0]}
    if dist.get_rank() != last:
        send(engine, group)
        return None

    def receive() -> None:
        for tensor in named.values():
            dist.broadcast(tensor, group_src=0, group=group)

    explorer = threading.Thread(target=receive)
    explorer.start()
    send(engine, None)
    explorer.join(60)
    return state_digest({name: named[name] for name in kept}, "BF16")


def _uneven(case: Mapping[str, Any], engine: Any, backend: Any, models: Path, folder: Path) -> dict[str, Any]:
    """Rows that ranks have or want in other numbers, gathered and summed over gloo, and the gradients of both."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    rank, group = dist.get_rank(), dist.group.WORLD
    sizes = [3, 0, 2, 4][: dist.get_world_size()]
    wholes = [torch.rand(sum(sizes), 2, generator=torch.Generator().manual_seed(of)) for of in range(len(sizes))]
    begin = sum(sizes[:rank])
    of_rank = slice(begin, begin + sizes[rank])
    mine, all_rows = wholes[0][of_rank].clone().requires_grad_(), wholes[rank].clone().requires_grad_()
    gathered = gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=sizes)
    (gathered * wholes[rank]).sum().backward()
    summed = reduce_scatter_to_sequence_parallel_region(all_rows, group=group, input_split_sizes=sizes)
    (summed * wholes[0][of_rank]).sum().backward()
    total = torch.stack(wholes).sum(0)
    pairs = {
        "gathered": (gathered, wholes[0]),
        "gradient of gathered": (mine.grad, total[of_rank]),
        "summed": (summed, total[of_rank]),
        "gradient of summed": (all_rows.grad, wholes[0]),
    }
    return {"uneven": {name: bool(torch.allclose(found, wanted)) for name, (found, wanted) in pairs.items()}}


_ACTIONS = {"version": _version, "save": _save, "load": _load, "late": _late, "functions": _functions} | {
    "poisoned": _poisoned,
    "uneven": _uneven,
    "failing": _failing,
    "refusals": _refusals,
}


def _rng() -> str:
    import random

    import numpy as np
    import torch

    state = torch.get_rng_state().numpy().tobytes() + np.random.get_state()[1].tobytes()
    return hashlib.sha256(state + repr(random.getstate()).encode()).hexdigest()


def _optimizer_hash(engine: Any) -> str:
    """Of this rank's master weights, moments and step counts, in the order of the parameters."""
    import torch

    found = hashlib.sha256()
    for one in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                state = one.optimizer.state[parameter]
                for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]):
                    found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def checkpoint_hashes(
    folder: Path, spans: Sequence[tuple[int, int]] = (), of_experts: Sequence[tuple[int, int]] = ()
) -> dict[str, str]:
    """Hash of every whole tensor in a checkpoint's model and optimizer, by its key: the same in all layouts.

    Args:
        spans: where parameters lie in a buffer; what is saved as it lies there has padding of no meaning between them.
        of_experts: where those of experts lie in theirs, which another optimizer has.
    """
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found = {}
    for tree in ("model", "optimizer"):
        reader = FileSystemReader(folder / tree / "dist_ckpt")
        described = reader.read_metadata().state_dict_metadata
        state = {
            key: torch.zeros(item.size, dtype=item.properties.dtype)
            for key, item in described.items()
            if isinstance(item, TensorStorageMetadata)
        }
        _load_state_dict(state, storage_reader=reader, no_dist=True)
        for key, whole in state.items():
            held = of_experts if "chained_1." in key else spans
            tensor = torch.cat([whole[a:b] for a, b in held]) if "bucket_idx" in key else whole
            found[f"{tree}: {key}"] = hashlib.sha256(
                tensor.contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
    return found
