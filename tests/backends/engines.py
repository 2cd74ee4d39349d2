"""Real verl engines in processes of their own: what `test_fsdp.py` asks of them, gathered in one start of them.

Importing verl costs seconds, so every rank goes through all cases and leaves what it found in a JSON file.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.families import OF_DEEPSEEK

PLATFORM = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "trinity_sync.backends.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

SIZES = {
    "vocab_size": 37,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}

DEEPSEEK = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 2,
    **OF_DEEPSEEK,
}

KEPT = "e_score_correction_bias"

LIMIT_S = 480

Examine = Callable[[Mapping[str, Any], Path, Path, int, int], dict[str, Any]]
"""What is found out of a case: of the case, the folder of the models, one for its own files, the rank, and of how many
ranks.
"""

_PRELOADED = [
    "torch.distributed.fsdp",
    "torch._inductor.compile_fx",
    "ray",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "tensordict",
    "peft",
    "pandas",
    "datasets",
    "torch.utils.tensorboard",
    "wandb",
]
"""What takes most of the seconds that each rank needs for its imports, and knows nothing of `PLATFORM`. One process
imports it, of which all ranks of all tests of this process are forks."""


def make_models(folder: Path) -> None:
    """A small Qwen3 with and without tied embeddings, sizes that no number of ranks divides; one with experts; and a
    DeepSeek-V3, whose class keeps router biases in fp32.
    """
    import torch
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    from trinity_sync.models.architecture import character_tokenizer
    from trinity_sync.weights.tensors import cast_model

    for name, tied in (("tied", True), ("untied", False)):
        torch.manual_seed(3)
        config = Qwen3Config(**SIZES, tie_word_embeddings=tied)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / name)
        character_tokenizer(37).save_pretrained(folder / name)
    experts = Qwen3MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)
    Qwen3MoeForCausalLM(experts).to(torch.bfloat16).save_pretrained(folder / "experts")
    character_tokenizer(37).save_pretrained(folder / "experts")
    biased = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
    for name, buffer in biased.named_buffers():
        if name.endswith(KEPT):
            buffer.normal_(std=0.1)  # as training leaves it, not of bf16
    cast_model(biased, torch.bfloat16, [KEPT])
    biased.save_pretrained(folder / "deepseek")
    character_tokenizer(37).save_pretrained(folder / "deepseek")


class Ranks:
    """Processes that go through the cases: `ranks` of them, started here.

    A case has `strategy`, `model` (``"tied"``, ``"untied"``, ``"experts"`` or ``"deepseek"``) and `fsdp_size`. Each
    start of ranks makes the models anew, and they are the same. `saved` are events by ``strategy-model``: two ranks
    have saved for one to load. `target` is what each process runs, where it is not the cases of the FSDP engines.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        cases: Sequence[Mapping[str, Any]],
        saved: Mapping[str, Any],
        target: Callable[..., None] | None = None,
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._processes = [
            context.Process(target=target or _rank, args=(rank, ranks, self._store.port, folder, list(cases), saved))
            for rank in range(ranks)
        ]
        before = {name: os.environ.get(name) for name in PLATFORM}
        os.environ.update(PLATFORM)
        try:
            for process in self._processes:
                process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)

    def facts(self) -> list[list[dict[str, Any]]]:
        """Wait for them; facts by case, then by rank."""
        try:
            for process in self._processes:
                process.join(LIMIT_S)
        finally:
            for process in self._processes:
                process.kill()
        assert [process.exitcode for process in self._processes] == [0] * self._ranks
        found = [json.loads(_facts_file(self._folder, self._ranks, rank).read_text()) for rank in range(self._ranks)]
        return [list(of_case) for of_case in zip(*found, strict=True)]


def join_group(port: int, rank: int, ranks: int) -> None:
    """Make the default group, through the store that the starter of the ranks has at this port."""
    import torch.distributed as dist

    store = dist.PrefixStore(f"{ranks} ranks", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)


def _facts_file(folder: Path, ranks: int, rank: int) -> Path:
    return folder / f"facts-{ranks}-{rank}.json"


def go_through(
    examine: Examine,
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    cases: Sequence[Mapping[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """What each process runs: the models are made, and each case is examined. `Ranks` takes it with `examine` given."""
    warnings.simplefilter("ignore")
    import torch.distributed as dist
    import verl  # noqa: F401 - loads the platform

    join_group(port, rank, ranks)
    models = folder / f"models-{ranks}"
    if rank == 0:
        make_models(models)
    dist.barrier()
    facts = [
        examine(case, models, folder / f"saves-{ranks}-{number}", rank, ranks) for number, case in enumerate(cases)
    ]
    _facts_file(folder, ranks, rank).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def _rank(
    rank: int, ranks: int, port: int, folder: Path, cases: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]
) -> None:
    refused = _torch_refuses_cpu_parameters()

    def examine(case: Mapping[str, Any], models: Path, saves: Path, rank: int, ranks: int) -> dict[str, Any]:
        facts = _examine(case, models, saves, rank, ranks, Shared(folder, saved))
        return facts | {"refused_before": refused, "refused_now": _torch_refuses_cpu_parameters()}

    go_through(examine, rank, ranks, port, folder, cases, saved)


def _torch_refuses_cpu_parameters() -> bool:
    """Whether FSDP1 with `sync_module_states`, which verl sets, can be had for parameters on a CPU."""
    import torch
    from torch.distributed.fsdp import _init_utils

    try:
        _init_utils._check_module_states_for_sync_module_states([torch.zeros(1)])
    except ValueError:
        return True
    return False


def _examine(
    case: Mapping[str, Any], models: Path, saves: Path, rank: int, ranks: int, shared: Shared
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from verl.utils.device import get_device_name

    from tests.backends.gradients import decays, gradients, passing_over
    from tests.backends.recomputing import divided_by_hand, recomputing
    from trinity_sync.backends.fsdp import FsdpBackend, logits_in_fp32
    from trinity_sync.weights.tensors import state_digest

    model = models / case["model"]
    engine = _engine(str(model), case["strategy"], case["fsdp_size"])
    logits_in_fp32(engine)
    backend = FsdpBackend(engine, "BF16")
    facts: dict[str, Any] = {"device": get_device_name(), "cuda": torch.cuda.is_available()}
    facts["refused"] = refused(backend, case["strategy"], ranks)
    if case["model"] in ("experts", "deepseek"):
        return facts | _experts(backend, engine, model, saves, rank)

    facts["file"] = state_digest(load_file(model / "model.safetensors"), "BF16")
    facts["initial"] = _digest(backend, ranks)
    facts["gradients"], facts["decays"] = gradients(engine, model), decays(engine)
    # The learning rate warms up from 0, so the first step changes nothing.
    _step(engine, rank, 0)
    facts["passed_over"] = passing_over(engine, lambda: _digest(backend, ranks))
    _step(engine, rank, 1)
    facts["after_step"] = _digest(backend, ranks)
    exported = {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}
    if case["model"] == "tied":
        exported.pop("lm_head.weight", None)
    facts["exported_by_verl"] = state_digest(exported, "BF16")
    facts["recomputing"], facts["divided"] = recomputing(engine), divided_by_hand(engine)

    torch.manual_seed(100 + rank)
    state = backend.state("verl")
    facts["names"] = sorted(state)
    facts["state"] = _hash(state)
    facts["rng_saved"] = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    lazy = Lazy(backend, state)
    _step(engine, rank, 2)
    facts["held"] = lazy.held
    lazy.write(saves / "ours" / "actor")
    facts["next"] = _digest(backend, ranks)
    facts["next_state"] = _hash(backend.state("verl"))
    facts["lr_next"] = engine.lr_scheduler.get_last_lr()

    second = Lazy(backend, backend.state("verl"))
    _step(engine, rank, 4)
    second.write(saves / "second" / "actor")
    dist.barrier()
    backend.load(saves / "second" / "actor")
    facts["second_loaded"], facts["second_state"] = _digest(backend, ranks), _hash(backend.state("verl"))

    torch.manual_seed(999)
    dist.barrier()
    backend.load(saves / "ours" / "actor")
    facts["loaded"] = _digest(backend, ranks)
    facts["rng_loaded"] = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    _step(engine, rank, 2)
    facts["next_after_load"] = _digest(backend, ranks)
    facts["next_state_after_load"] = _hash(backend.state("verl"))
    facts["lr_next_after_load"] = engine.lr_scheduler.get_last_lr()

    engine.save_checkpoint(str(saves / "verl" / "actor"), global_step=3)
    _step(engine, rank, 3)
    backend.load(saves / "verl" / "actor")
    facts["loaded_from_verl"] = _digest(backend, ranks)
    facts["verl_names"] = sorted(path.name for path in (saves / "verl" / "actor").glob(f"*_rank_{rank}.pt"))
    facts["saves"] = str(saves)
    if rank == 0:
        _merge(saves / "verl" / "actor", saves / "merged")
        facts["metadata"] = sorted(
            str(path.relative_to(saves / "ours")) for path in backend.write_metadata(saves / "ours" / "actor")
        )
        facts["came"] = text_of_files(Path(engine.model_config.local_path))
        facts["kept"] = text_of_files(saves / "ours" / "actor" / "huggingface")
    dist.barrier()
    return facts | _distributed(backend, engine, case, saves, rank, shared)


def text_of_files(folder: Path) -> dict[str, str]:
    """The files of a model but its weights, as text by path."""
    from trinity_sync.models.files import ModelFiles

    return {name: data.decode() for name, data in ModelFiles.read(folder).contents.items()}


def _experts(backend: Any, engine: Any, model: Path, saves: Path, rank: int) -> dict[str, Any]:
    """Versions of a model whose experts are held as one tensor, and the export of a checkpoint of the second one."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from trinity_sync.checkpoint.reading import open_weights
    from trinity_sync.weights.tensors import state_digest
    from trinity_sync.weights.wire import WireFormat

    ranks = dist.get_world_size()
    wire = WireFormat.seen("BF16", {name: saved.dtype for name, saved in backend.saved().items()})
    facts: dict[str, Any] = {"kept": sorted(wire.keep_fp32), "rounded": _refused_in_bf16(model, wire)}
    file = load_file(model / "model.safetensors")
    facts |= {"file": state_digest(file, wire), "file_in_bf16": state_digest(file, "BF16")}
    facts |= {"initial": _digest(backend, ranks), "explorer": _held_by_explorer(backend, model, ranks)}
    first = backend.sources()
    _step(engine, rank, 0)
    _step(engine, rank, 1)
    again = backend.sources()
    facts["same_sources"] = all(again[name] is tensor for name, tensor in first.items())
    facts["after_step"] = _digest(backend, ranks)
    lazy = Lazy(backend, backend.state("verl"))
    lazy.write(saves / "experts" / "actor")
    if rank == 0:
        backend.write_metadata(saves / "experts" / "actor")
    dist.barrier()
    if rank == 0:
        facts["exported"] = open_weights(saves / "experts").digest(wire)
    return facts


def _refused_in_bf16(model: Path, wire: Any) -> str | None:
    """What is said of master weights in bf16, where something is kept in fp32. Collective."""
    from trinity_sync.backends.fsdp import FsdpBackend
    from trinity_sync.errors import ConfigError

    if not wire.keep_fp32:
        return None
    engine = _engine(str(model), "fsdp2", -1, dtype="bf16")
    FsdpBackend(engine, "BF16", keep_fp32=[])
    try:
        FsdpBackend(engine, "BF16")
    except ConfigError as error:
        return str(error)
    return None


def _held_by_explorer(backend: Any, model: Path, ranks: int) -> str:
    """Version digest of what an explorer in bf16 takes of what all ranks stage."""
    from trinity_sync.explorer.hf import HFEngine
    from trinity_sync.weights.apply import Receiver
    from trinity_sync.weights.digests import version_digest

    parts = staged(backend, ranks)
    engine = HFEngine(str(model), dtype="bf16", temperature=1.0, batch_size=2, response_length=2, seed=0)
    receiver = Receiver(engine.destinations())
    receiver.check([described for described, _ in parts])
    receiver.begin()
    for described, data in parts:
        receiver.apply(described, data)
    return version_digest(receiver.taken())


def _merge(actor: Path, target: Path) -> None:
    """verl's own tool: from the ranks' files to a Hugging Face folder, in bf16."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    target.mkdir()
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(actor),
        target_dir=str(target),
        hf_model_config_path=str(actor / "huggingface"),
    )
    FSDPModelMerger(config).merge_and_save()


def _engine(
    model: str,
    strategy: str,
    fsdp_size: int,
    dtype: str = "fp32",
    attention: str = "sdpa",
    packed: bool = False,
    sharing: int = 1,
    **of_model: Any,
) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    engine = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=HFModelConfig(
            path=model,
            use_remove_padding=packed,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": attention},
            **of_model,
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            fsdp_size=fsdp_size,
            ulysses_sequence_parallel_size=sharing,
            model_dtype=dtype,
            mixed_precision={"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            wrap_policy={"min_num_params": 0},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, total_training_steps=20, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.0
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def adapted(model: Path, strategy: str, lora_rank: int, targets: Any = "all-linear") -> Any:
    """An engine that trains an adapter on all ranks."""
    return _engine(str(model), strategy, -1, lora_rank=lora_rank, lora_alpha=8, target_modules=targets)


def packing(model: Path, strategy: str, sharing: int = 1) -> Any:
    """An engine that takes sequences without padding, each of which so many ranks share."""
    from trinity_sync.backends import packed_attention
    from trinity_sync.backends.option import ATTENTION

    packed_attention.register()
    return _engine(str(model), strategy, -1, attention=ATTENTION, packed=True, sharing=sharing)


def padding(model: Path, strategy: str) -> Any:
    """An engine that pads sequences to the longest of a micro-batch."""
    return _engine(str(model), strategy, -1)


def write_state(state: Any, form: str, actor: Path) -> None:
    """Write a rank's files of a checkpoint. Collective."""
    import torch
    import torch.distributed as dist

    from trinity_sync.backends import fsdp_state
    from trinity_sync.backends.meetings import Meetings

    actor.mkdir(parents=True, exist_ok=True)
    for name, value in state.files(form).items():
        if name == "dcp":
            meeting = Meetings.of_default_group(LIMIT_S).begin("the state")
            fsdp_state.write(value, lambda tensor: tensor.detach().cpu(), actor / name, meeting)
        else:
            torch.save(value, actor / name)
    dist.barrier()


def drawn_pairs(number: int, rank: int) -> list[tuple[Any, Any]]:
    """The tokens, prompt and answer, of which a data-parallel rank takes this step."""
    import numpy as np

    draw = np.random.default_rng([number, rank])
    return [(draw.integers(3, 30, 5), draw.integers(3, 30, 4)) for _ in range(4)]


def _step(engine: Any, rank: int, number: int) -> dict[str, Any]:
    """Train a step; the engine's metrics."""
    from verl.workers.utils.losses import sft_loss

    from trinity_sync.trainer.training_batch import sft_batch

    pairs = drawn_pairs(number, rank)
    data = sft_batch(
        [prompt for prompt, _ in pairs], [answer for _, answer in pairs], micro_batch=2, global_mini_batch=4
    )
    with engine.train_mode():
        metrics: dict[str, Any] = engine.train_batch(data, loss_function=partial(sft_loss, None)).get("metrics", {})
    engine.lr_scheduler_step()
    return metrics


def refused(backend: Any, strategy: str, ranks: int) -> str | None:
    """What the driver says of the ranks' shards; None: they are all that `save_pretrained` would write."""
    import torch.distributed as dist

    from trinity_sync.actors.rank_client import RankInfo
    from trinity_sync.errors import ConfigError
    from trinity_sync.trainer.worker_spec import check_whole
    from trinity_sync.weights.layout import PartLayout

    rank = dist.get_rank()
    layout = PartLayout.build(f"rank-{rank}", backend.shards(), 1 << 16)
    saved = {name: tensor[:2] for name, tensor in backend.saved().items()} if rank == 0 else None
    info = RankInfo(rank=rank, part=layout.part, layout=layout, node="here", pid=0, saved=saved)
    infos: list[Any] = [None] * ranks
    dist.all_gather_object(infos, info)
    try:
        check_whole(infos, strategy)
    except ConfigError as error:
        return str(error)
    return None


def _digest(backend: Any, ranks: int) -> str:
    """Version digest from what all ranks stage; checks on the way that together they hold each tensor once."""
    from trinity_sync.weights.digests import digest_rows
    from trinity_sync.weights.shards import check_cover

    parts = staged(backend, ranks)
    check_cover([layout.shards for layout, _ in parts])
    return digest_rows(parts).version_digest()


def staged(backend: Any, ranks: int) -> list[tuple[Any, bytes]]:
    """Layout and bytes of what each rank stages, of the ranks that hold something. Collective."""
    import torch.distributed as dist

    from trinity_sync.weights.layout import PartLayout
    from trinity_sync.weights.staging import stage

    layout = PartLayout.build(f"rank-{dist.get_rank()}", backend.shards(), 1 << 16)
    segment = bytearray(max(layout.nbytes, 1))
    stage(layout, backend.sources(), memoryview(segment))
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (layout.to_json(), bytes(segment)))
    parts = [(PartLayout.from_json(described), data) for described, data in gathered]
    return [(described, data) for described, data in parts if described.entries]


def _distributed(
    backend: Any, engine: Any, case: Mapping[str, Any], saves: Path, rank: int, shared: Shared
) -> dict[str, Any]:
    """Save and load in the format for any number of ranks; what two ranks saved is loaded by one as well."""
    import torch
    import torch.distributed as dist

    from trinity_sync.backends.meetings import Meetings

    ranks = dist.get_world_size()
    meetings = Meetings.of_default_group(LIMIT_S)
    lazy = Lazy(backend, backend.state("dcp"))
    facts: dict[str, Any] = {"dcp_saved": _whole(backend)}
    _step(engine, rank, 7)
    facts["dcp_failed"] = _fail_together(lazy, meetings, saves, rank, ranks)
    lazy.write(saves / "dcp" / "actor", meetings.begin("the state"))
    torch.manual_seed(1)
    facts["dcp_changed"] = _whole(backend)
    second = Lazy(backend, backend.state("dcp"))
    _step(engine, rank, 8)
    second.write(saves / "second-dcp" / "actor", meetings.begin("the second state"))
    dist.barrier()
    backend.load(saves / "second-dcp" / "actor")
    facts["dcp_second_loaded"] = _whole(backend)
    backend.load(saves / "dcp" / "actor")
    facts["dcp_loaded"] = _whole(backend)
    if rank == 0 and ranks == 2:
        shared.announce(case, saves / "dcp" / "actor", facts["dcp_saved"])
    if ranks == 1:
        folder, expected = shared.wait_for(case)
        backend.load(folder)
        facts["dcp_of_two"] = expected
        facts["dcp_of_two_loaded"] = _whole(backend)
    return facts


def _fail_together(lazy: Lazy, meetings: Any, saves: Path, rank: int, ranks: int) -> list[str]:
    """What a rank is told of saves that the last rank gives up before it writes, cannot write, and is late to."""
    import torch.distributed as dist

    from trinity_sync.errors import RunError

    last, told = rank == ranks - 1, []
    store = dist.distributed_c10d._get_default_store()
    for name in ("no-turn", "torn", "late"):
        gave_up = f"the others gave up in {saves.name}"
        try:
            meetings.timeout_s = 0.5 if name == "late" and not last else LIMIT_S
            meeting = meetings.begin(name)
            if last and name == "no-turn":
                meeting.give_up(RunError("the monitor is gone"))
                raise RunError("no turn")
            if last and name == "torn":
                (saves / name / "dcp" / f"__{rank}_0.distcp").mkdir(parents=True)
            if last and name == "late" and ranks > 1:
                assert store.get(gave_up)
            lazy.write(saves / name, meeting)
        except RunError as error:
            told.append(str(error))
        if name == "late" and not last:
            store.set(gave_up, "yes")
    meetings.timeout_s = LIMIT_S
    return told


def _whole(backend: Any) -> str:
    """Of all tensors of model and optimizer by name, put together from all ranks."""
    import torch
    from torch.distributed.checkpoint.state_dict import _gather_state_dict

    found = hashlib.sha256()
    whole = _gather_state_dict(backend.state("dcp")["dcp"])
    for name, tensor in sorted(_flat(whole)):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    import torch

    if isinstance(value, Mapping):
        return [entry for key, item in value.items() for entry in _flat(item, f"{name}.{key}")]
    return [(name, value)] if isinstance(value, torch.Tensor) else []


class Shared:
    """What runs with different numbers of ranks tell each other."""

    def __init__(self, folder: Path, saved: Any) -> None:
        self._folder = folder
        self._saved = saved

    def announce(self, case: Mapping[str, Any], saved: Path, digest: str) -> None:
        """Two ranks have saved. Of the cases, the one with this model and either engine counts."""
        name = f"{case['strategy']}-{case['model']}"
        if name in self._saved:
            (self._folder / f"dcp-{name}.json").write_text(json.dumps([str(saved), digest]))
            self._saved[name].set()

    def wait_for(self, case: Mapping[str, Any]) -> tuple[Path, str]:
        """What two ranks have saved of this model, with the other engine."""
        name = f"fsdp2-{case['model']}"
        assert self._saved[name].wait(LIMIT_S)
        saved, digest = json.loads((self._folder / f"dcp-{name}.json").read_text())
        return Path(saved), digest


class Lazy:
    """A snapshot of a state that is copied while the engine trains on, and written later."""

    def __init__(self, backend: Any, state: Mapping[str, Any]) -> None:
        from trinity_sync.weights.snapshot import Snapshot, plan

        planned = plan(state)
        self._segment = bytearray(planned.nbytes)
        self.held = 0
        self._backend = backend
        backend.before_change(self._hold)
        self._snapshot = Snapshot(planned, self._segment, "the state")
        self._snapshot.copy(in_background=True)

    def _hold(self) -> None:
        self.held += 1
        self._snapshot.wait_until_copied(LIMIT_S)

    def write(self, folder: Path, meeting: Any = None) -> None:
        from trinity_sync.weights.shard_file import write_image

        folder.mkdir(parents=True, exist_ok=True)
        names = self._snapshot.names - {"dcp"}
        if names < self._snapshot.names:
            copied = partial(self._snapshot.copied, timeout_s=LIMIT_S)
            self._backend.write_distributed(self._snapshot.live("dcp"), copied, folder / "dcp", meeting)
        for image in self._snapshot.file_images(folder, LIMIT_S, names):
            write_image(Path(image.path), image.extents, self._segment, durable=False)


def _hash(state: Mapping[str, Any]) -> str:
    """Of all tensors in the model and optimizer files, in the order of their names."""
    import torch

    found = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(
                local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
            )
        elif isinstance(value, Mapping):
            # torch gives back what it has loaded in the order of a set of names, another one in each process
            for name in sorted(value, key=str):
                visit(value[name])
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    for name in sorted(state):
        if not name.startswith("extra"):
            visit(state[name])
    return found.hexdigest()
