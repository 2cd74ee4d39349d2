"""What an option of `backend` names: everything that depends on the training engine, but for what the engine holds.

A subclass of `BackendOption` is light: the driver checks a configuration with it, so what imports torch, verl or an
engine is imported in the methods that a trainer's rank calls.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from trinity_sync.backends.sequence_packing import unpackable
from trinity_sync.config import Check, Get, Problem, build
from trinity_sync.config.model_checks import model_fields
from trinity_sync.config.schema import BackendConfig, Config
from trinity_sync.host.package_source import dataclass_fields

_BATCH_KEYS = {
    "micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "infer_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "use_dynamic_bsz": "trainer.max_tokens",
    "max_token_len_per_gpu": "trainer.max_tokens",
    "infer_max_token_len_per_gpu": "trainer.max_tokens",
    "use_remove_padding": "trainer.remove_padding",
}
PACKED = "needs sequences packed without padding, and is not tried with those; leave it out"
"""Why a field of verl's engine config is `useless`."""


class BackendOption(ABC):
    """A training engine as the keys of `backend` configure it, which are its attributes. One of your own is a dataclass
    that inherits `trinity_sync.config.schema.BackendConfig`, too.

    Attributes:
        checks: on the configuration, beside the ranges that the schema has.
        engine_config: class of verl's engine config, in its `workers/config/engine.py`; None: another's, or none.
        engine_keys: fields of verl's engine config that other keys set, and those keys.
        useless: fields of it that would have no effect, or that nothing here works with, and why.
        reads: labels (`backend.strategy`) of the backends whose full checkpoints this one can load, as far as
            `check_resume` allows it. Of others it takes the weights.
        takes_weights: whether it can begin with the weights of a checkpoint that it cannot load.
        trains_adapters: whether it trains a LoRA adapter in place of the weights (`model.lora`).
        no_adapters: of one that does not, what is said of it.
        worker: class of the ranks, made of a `trainer.worker_spec.WorkerSpec`; as text, since it lies above.
        writes_own_files: its checkpoints are more than one object per file, so it writes them itself.
    """

    strategy: str
    ranks: int

    checks: ClassVar[tuple[Check, ...]] = ()
    engine_config: ClassVar[str | None] = None
    engine_keys: ClassVar[Mapping[str, str]] = {}
    useless: ClassVar[Mapping[str, str]] = {
        "pad_to_length": PACKED,
        "pad_to_length_bucket": PACKED,
        "use_fused_kernels": "needs a fused output layer, which is not put in here; leave it out",
        "forward_only": "leaves out the optimizer, and a trainer needs one; leave it out",
    }
    reads: ClassVar[frozenset[str]] = frozenset()
    takes_weights: ClassVar[bool] = True
    writes_own_files: ClassVar[bool] = False
    trains_adapters: ClassVar[bool] = False
    no_adapters: ClassVar[str] = "trains no LoRA adapter"
    worker: ClassVar[str] = "trinity_sync.trainer.worker.TrinityWorker"

    # -- in the driver

    @property
    def compute_dtype(self) -> str:
        """In which dtype forward and backward compute: ``bf16``, ``fp16`` or ``fp32``."""
        return "bf16"

    @classmethod
    def all_checks(cls) -> tuple[Check, ...]:
        """Its own, and those of every engine."""
        return (*cls.checks, check_max_tokens, partial(check_overrides, cls), partial(check_adapters, cls))

    @classmethod
    def sharing_ranks(cls, get: Get) -> tuple[int, str] | None:
        """Among how many ranks a batch is divided, and how to call that number; None: it is no whole number."""
        return get("backend.ranks"), "backend.ranks"

    @classmethod
    def overridden(cls, get: Get) -> Iterator[tuple[str, str | None]]:
        """Fields of verl's engine config that `backend.overrides` gives, each with the key of ours that sets it."""
        backend = get("backend")
        named = {name: f"backend.{name}" for name in map(str, backend) if name != "overrides"}
        named |= _BATCH_KEYS | dict(cls.engine_keys)
        yield from ((name, named.get(name)) for name in map(str, backend.overrides))

    @abstractmethod
    def engine_fields(self, cfg: Config) -> dict[str, Any]:
        """What `engine_configs` makes verl's engine config of, from the whole configuration."""

    @abstractmethod
    def optimizer_fields(self, cfg: Config) -> dict[str, Any]:
        """What `engine_configs` makes verl's optimizer config of, from the whole configuration."""

    def check_resume(self, checkpoint: Path, saved_by: str, ranks: int) -> str | None:
        """Whether the engine can load all of a checkpoint of a backend that it `reads`.

        Args:
            checkpoint: the step folder.
            saved_by: the backend's label.
            ranks: how many saved it.

        Returns:
            What the user should know, None where nothing changes.

        Raises:
            ConfigError: it cannot; says what to set.
        """
        return None

    # -- in a rank of the trainer

    @property
    def ranks_per_sequence(self) -> int:
        """Among how many ranks each sequence is divided."""
        return 1

    def packs(self, model: Mapping[str, Any], attention: str, wanted: str) -> bool:
        """Whether the engine computes a model's sequences without padding, one after another.

        Args:
            model: the fields of its Hugging Face config.
            attention: `model.attn_implementation`.
            wanted: `trainer.remove_padding`.

        Raises:
            ConfigError: it is asked to, and cannot; names the key.
        """
        return False

    def make_model(
        self, engine: Mapping[str, Any], architecture: Mapping[str, object], seed: int, folder: Path
    ) -> None:
        """Write the model that a run begins with which names none; on rank 0, before the engine is built.

        Args:
            engine: what `engine_fields` gave.
            architecture: `model.architecture`.
            seed: of the run.
            folder: to be made.

        Raises:
            ConfigError: it cannot be made.
        """
        from transformers.utils import logging

        from trinity_sync.models.architecture import make_model

        logging.disable_progress_bar()
        make_model(architecture, seed, folder)

    def prepare(self) -> None:  # noqa: B027 - most engines need nothing
        """Before verl builds the engine."""

    @abstractmethod
    def engine_configs(self, engine: Mapping[str, Any], optimizer: Mapping[str, Any]) -> tuple[Any, Any]:
        """verl's configs of the engine and of its optimizer."""

    def reference_fields(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of verl's engine config for a model that infers only, beside the one that is trained.

        Args:
            engine: what `engine_fields` gave.
        """
        return {**engine, "forward_only": True}

    def divide_in_fp32(self, engine: Any) -> None:  # noqa: B027 - most engines do
        """Where the sampler's temperature is not 1: have the engine divide logits by it in fp32, as explorers do.
        Called once, when the engine is initialised.
        """

    def random_numbers_kept(self) -> AbstractContextManager[None]:
        """Inside, drawing random numbers changes none of those that training draws afterwards."""
        import torch

        return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])

    @abstractmethod
    def view(self, engine: Any, wire_dtype: str, keep_fp32: Sequence[str] | None, *, merged: bool = False) -> Any:
        """The rank's view of the engine, once that is initialised: a `trinity_sync.backends.base.Backend`, of which one
        that `writes_own_files` has the saving of `SelfWritingBackend` instead.

        Args:
            wire_dtype: in which floating parameters travel, as safetensors names it.
            keep_fp32: which of them travel in fp32 nevertheless, see `saved_by`.
            merged: of an engine that `trains_adapters` and trains one: versions are the sum of it and its base.
        """


def backend_option(node: BackendConfig) -> BackendOption:
    """What the configuration's option of `backend` names, with its keys.

    Raises:
        ConfigError: the class cannot be used.
    """
    return build("backend", vars(node), BackendOption)  # type: ignore[type-abstract]


_ENGINES = "workers/config/engine.py"


def check_overrides(option: type[BackendOption], get: Get) -> Iterator[Problem]:
    """What has a key of its own is checked, noted and compared there; at verl it would win over that in silence. What
    every batch sets for itself would be passed over in silence.
    """
    known = None if option.engine_config is None else dataclass_fields("verl", _ENGINES, option.engine_config)
    for name, key in option.overridden(get):
        why = option.useless.get(name.rpartition(".")[2])
        if why is not None:
            if not _is_off(get(f"backend.overrides.{name}")):
                yield Problem(f"backend.overrides.{name}", f"{why} (at a resume: ~backend.overrides.{name})")
        elif key is not None:
            yield Problem(f"backend.overrides.{name}", f"would take the place of {key}; set that instead")
        elif known is not None and name.partition(".")[0] not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            yield Problem(f"backend.overrides.{name}", f"is no field of verl's {option.engine_config}{meant}")


def _is_off(value: object) -> bool:
    """Whether a setting asks for what is done anyway."""
    return value is None or value is False or (value == 1 and value is not True)


def check_adapters(option: type[BackendOption], get: Get) -> Iterator[Problem]:
    """That the engine trains adapters where one is asked for."""
    if option.trains_adapters:
        return
    for key, none in (("model.lora.rank", 0), ("model.lora.path", None)):
        if get(key) != none:
            yield Problem(
                key,
                f"is {get(key)}, but backend={get('backend.strategy')} {option.no_adapters}; use backend=fsdp2 or "
                "backend=fsdp, or leave it out",
            )


def shared_fields(cfg: Config) -> dict[str, Any]:
    """Fields of the engine configs that verl's engines have in common."""
    return {
        "param_offload": cfg.backend.param_offload,
        "optimizer_offload": cfg.backend.optimizer_offload,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1,
        "infer_micro_batch_size_per_gpu": 1,
    }


def adam_fields(cfg: Config) -> dict[str, Any]:
    """Fields of the optimizer configs that verl's engines have in common."""
    trainer = cfg.trainer
    return {
        "lr": trainer.lr,
        "betas": tuple(trainer.betas),
        "weight_decay": trainer.weight_decay,
        "clip_grad": trainer.clip_grad,
        "lr_warmup_steps": trainer.warmup_steps,
        "total_training_steps": trainer.steps,
    }


# Checks of how sequences are batched: by how many tokens, and whether without padding.


def check_max_tokens(get: Get) -> Iterator[Problem]:
    """That the longest sequence fits, where the task has keys for lengths."""
    most, task, sharing = get("trainer.max_tokens"), get("task"), get("backend").get("sp", 1)
    if most is None or not isinstance(task, Mapping):
        return
    names = ("max_length",) if "max_length" in task else ("prompt_length", "response_length")
    lengths = [get(f"task.{name}") for name in names if name in task]
    if len(lengths) == len(names) and all(isinstance(length, int) for length in lengths):
        longest = sum(lengths)
        if longest > most * sharing:
            named = " + ".join(f"task.{name}" for name in names)
            yield Problem(
                "trainer.max_tokens",
                f"is {most}, but a sequence may have {longest} tokens ({named}), and none is cut; set it to "
                f"{-(-longest // sharing)} or more",
            )


def check_unpadded(backend: str, get: Get) -> Iterator[Problem]:
    """Of an engine that pads: that nobody asks for more."""
    if get("trainer.remove_padding") == "always":
        yield Problem(
            "trainer.remove_padding",
            f"is always, but backend={backend} pads sequences to the longest of a micro-batch; set it to auto, or use "
            "backend=fsdp2 or backend=fsdp",
        )


def check_packing(get: Get) -> Iterator[Problem]:
    """Of an engine that packs: that the model, where it is at hand, takes what is asked for."""
    wanted, sharing, model = get("trainer.remove_padding"), get("backend.sp"), model_fields(get)
    if sharing > 1 and wanted == "never":
        yield Problem(
            "trainer.remove_padding", f"is never, but ranks share sequences (backend.sp={sharing}); set it to auto"
        )
    if model and (text := refused(wanted, sharing, model, get("model.attn_implementation"))):
        yield Problem(*text)


def refused(wanted: str, sharing: int, model: Mapping[str, Any], attention: str) -> tuple[str, str] | None:
    """Which key asks for packed sequences that the model does not take, and what is to be said of it.

    Args:
        wanted: `trainer.remove_padding`.
        sharing: `backend.sp`.
        model: fields of its Hugging Face config.
        attention: `model.attn_implementation`.
    """
    why = unpackable(model, attention)
    if why is None or (wanted != "always" and sharing == 1):
        return None
    if sharing > 1:
        return "backend.sp", f"is {sharing}, for which sequences are packed without padding, but {why}; set it to 1"
    return "trainer.remove_padding", f"is always, but {why}; set it to auto"


def check_sharing(get: Get) -> Iterator[Problem]:
    """That ranks can share a sequence."""
    ranks, sharing, model = get("backend.ranks"), get("backend.sp"), model_fields(get)
    if ranks % sharing:
        yield Problem("backend.sp", f"is {sharing}; must divide backend.ranks ({ranks})")
    heads, pairs = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if isinstance(heads, int) and heads % sharing:
        yield Problem("backend.sp", f"is {sharing}; it must divide the model's num_attention_heads ({heads})")
    elif isinstance(pairs, int) and pairs % sharing and sharing % pairs:
        yield Problem(
            "backend.sp", f"is {sharing}; it must divide the model's num_key_value_heads ({pairs}), or be a multiple"
        )
