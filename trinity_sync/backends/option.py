"""The options of `backend`: everything that depends on the training engine, except its tensors.

A subclass of `BackendOption` is light, because the driver checks a configuration with it: torch, verl and engines are
imported in the methods that a trainer's rank calls.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from trinity_sync.config import Check, Get, Problem, build
from trinity_sync.config.model_checks import model_fields
from trinity_sync.config.schema import BackendConfig, Config
from trinity_sync.errors import near
from trinity_sync.host.package_source import dataclass_fields

if TYPE_CHECKING:
    from trinity_sync.backends.base import Engine, View

ConfigFields: TypeAlias = dict[str, object]
"""Fields of one of verl's config classes."""

_BATCH_KEYS = {
    "micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "infer_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "use_dynamic_bsz": "trainer.max_tokens",
    "max_token_len_per_gpu": "trainer.max_tokens",
    "infer_max_token_len_per_gpu": "trainer.max_tokens",
    "use_remove_padding": "trainer.remove_padding",
}
PACKED = "needs sequences packed without padding, and is not tried with those; leave it out"
"""Reason for a `useless` field of verl's engine config."""


class BackendOption(ABC):
    """A training engine as configured by the keys of `backend`, which are its attributes.

    Your own is a dataclass that inherits `trinity_sync.config.schema.BackendConfig`, too.

    Attributes:
        checks: on the configuration, in addition to the ranges of the schema.
        engine_config: class of verl's engine config, in its `workers/config/engine.py`; None: another's, or none.
        engine_keys: fields of verl's engine config that other keys set, and those keys.
        useless: fields of it that have no effect or are not supported, with the reason.
        reads: labels (`backend.strategy`) of the backends whose full checkpoints this one can load, as far as
            `check_resume` allows it. Of others it takes the weights.
        takes_weights: whether it can start with the weights of a checkpoint that it cannot load.
        trains_adapters: whether it trains a LoRA adapter in place of the weights (`model.lora`).
        no_adapters: the reason where it does not.
        worker: class of the ranks, made from a `trainer.worker_spec.WorkerSpec`; as text, because it is in a higher
            package.
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
        """The dtype of forward and backward passes: ``bf16``, ``fp16`` or ``fp32``."""
        return "bf16"

    @classmethod
    def all_checks(cls) -> tuple[Check, ...]:
        return (*cls.checks, check_max_tokens, partial(check_overrides, cls), partial(check_adapters, cls))

    @classmethod
    def sharing_ranks(cls, get: Get) -> tuple[int, str] | None:
        """Return the number of ranks that divide a batch, and its name; None: it is not a whole number."""
        return get("backend.ranks"), "backend.ranks"

    @classmethod
    def overridden(cls, get: Get) -> Iterator[tuple[str, str | None]]:
        """Yield the fields of verl's engine config in `backend.overrides`, each with our key that sets it."""
        backend = get("backend")
        named = {name: f"backend.{name}" for name in map(str, backend) if name != "overrides"}
        named |= _BATCH_KEYS | dict(cls.engine_keys)
        yield from ((name, named.get(name)) for name in map(str, backend.overrides))

    @abstractmethod
    def engine_fields(self, cfg: Config) -> ConfigFields:
        """Return the fields of verl's engine config for `engine_configs`, from the whole configuration."""

    @abstractmethod
    def optimizer_fields(self, cfg: Config) -> ConfigFields:
        """Return the fields of verl's optimizer config for `engine_configs`, from the whole configuration."""

    def check_resume(self, checkpoint: Path, saved_by: str, ranks: int) -> str | None:
        """Check that the engine can load all of a checkpoint of a backend that it `reads`.

        Args:
            checkpoint: the step folder.
            saved_by: the backend's label.
            ranks: the number of ranks that saved it.

        Returns:
            A message for the user, None where nothing changes.

        Raises:
            ConfigError: it cannot; names the keys to set.
        """
        return None

    # -- in a rank of the trainer

    @property
    def ranks_per_sequence(self) -> int:
        """The number of ranks that share each sequence."""
        return 1

    def packs(self, model: Mapping[str, object], attention: str, wanted: str) -> bool:
        """Return whether the engine computes a model's sequences without padding, one after another.

        Args:
            model: the fields of its Hugging Face config.
            attention: `model.attn_implementation`.
            wanted: `trainer.remove_padding`.

        Raises:
            ConfigError: it is requested, but not possible; names the key.
        """
        return False

    def make_model(
        self, engine: Mapping[str, object], architecture: Mapping[str, object], seed: int, folder: Path
    ) -> None:
        """Write the initial model of a run that names none; on rank 0, before the engine is built.

        Args:
            engine: the result of `engine_fields`.
            architecture: `model.architecture`.
            seed: of the run.
            folder: is created.

        Raises:
            ConfigError: it cannot be made.
        """
        from transformers.utils import logging

        from trinity_sync.models.architecture import make_model

        logging.disable_progress_bar()
        make_model(architecture, seed, folder)

    def prepare(self) -> None:  # noqa: B027 - most engines need nothing
        """Prepare the process, before verl builds the engine."""

    @abstractmethod
    def engine_configs(self, engine: Mapping[str, object], optimizer: Mapping[str, object]) -> tuple[object, object]:
        """Return verl's configs of the engine and of its optimizer."""

    def reference_fields(self, engine: Mapping[str, object]) -> ConfigFields:
        """Return the fields of verl's engine config for an additional model that only infers, from `engine_fields`."""
        return {**engine, "forward_only": True}

    def divide_in_fp32(self, engine: Engine) -> None:  # noqa: B027 - most engines do
        """Have the engine divide logits by the sampler's temperature in fp32, as explorers do.

        Called once, when the engine is initialised, if the temperature is not 1.
        """

    def random_numbers_kept(self) -> AbstractContextManager[None]:
        """Keep the random numbers of training unchanged by draws inside the block."""
        import torch

        return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])

    @abstractmethod
    def view(self, engine: Engine, wire_dtype: str, keep_fp32: Sequence[str] | None, *, merged: bool = False) -> View:
        """Return the rank's view of the initialised engine: a `trinity_sync.backends.base.Backend`, or a
        `SelfWritingBackend` if it `writes_own_files`.

        Args:
            wire_dtype: of floating parameters, as safetensors names it.
            keep_fp32: those that travel in fp32 instead, see `saved_by`.
            merged: for an engine that `trains_adapters` and trains one: versions are the sum of it and its base.
        """


def backend_option(node: BackendConfig) -> BackendOption:
    """Return the configured option of `backend`, with its keys; a `ConfigError` if its class cannot be used."""
    return build("backend", vars(node), BackendOption)  # type: ignore[type-abstract]


_ENGINES = "workers/config/engine.py"


def check_overrides(option: type[BackendOption], get: Get) -> Iterator[Problem]:
    """Check `backend.overrides`: a field with a key of ours would silently replace that, and fields of a batch have no
    effect.
    """
    known = None if option.engine_config is None else dataclass_fields("verl", _ENGINES, option.engine_config)
    for name, key in option.overridden(get):
        why = option.useless.get(name.rpartition(".")[2])
        if why is not None:
            value = get(f"backend.overrides.{name}")
            off = value is None or value is False or (value == 1 and value is not True)
            if not off:
                yield Problem(f"backend.overrides.{name}", f"{why} (at a resume: ~backend.overrides.{name})")
        elif key is not None:
            yield Problem(f"backend.overrides.{name}", f"would take the place of {key}; set that instead")
        elif known is not None and name.partition(".")[0] not in known:
            told = f"is not a field of verl's {option.engine_config}{near(name, known)}"
            yield Problem(f"backend.overrides.{name}", told)


def check_adapters(option: type[BackendOption], get: Get) -> Iterator[Problem]:
    """Check that the engine trains adapters if one is requested."""
    if option.trains_adapters:
        return
    for key, none in (("model.lora.rank", 0), ("model.lora.path", None)):
        if get(key) != none:
            yield Problem(
                key,
                f"is {get(key)}, but backend={get('backend.strategy')} {option.no_adapters}; use backend=fsdp2 or "
                "backend=fsdp, or leave it out",
            )


def shared_fields(cfg: Config) -> ConfigFields:
    """Return the common fields of verl's engine configs."""
    return {
        "param_offload": cfg.backend.param_offload,
        "optimizer_offload": cfg.backend.optimizer_offload,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1,
        "infer_micro_batch_size_per_gpu": 1,
    }


def adam_fields(cfg: Config) -> ConfigFields:
    """Return the common fields of verl's optimizer configs."""
    trainer = cfg.trainer
    return {
        "lr": trainer.lr,
        "betas": tuple(trainer.betas),
        "weight_decay": trainer.weight_decay,
        "clip_grad": trainer.clip_grad,
        "lr_warmup_steps": trainer.warmup_steps,
        "total_training_steps": max(trainer.steps, 1),
    }


# Checks of batches: their tokens and their padding.


def check_max_tokens(get: Get) -> Iterator[Problem]:
    """Check that the longest sequence fits, where the task has keys for lengths."""
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
    """Check that packing is not required of an engine that pads."""
    if get("trainer.remove_padding") == "always":
        yield Problem(
            "trainer.remove_padding",
            f"is always, but backend={backend} pads sequences to the longest of a micro-batch; set it to auto, or use "
            "backend=fsdp2 or backend=fsdp",
        )


def check_packing(get: Get) -> Iterator[Problem]:
    """Check that the model, where it is at hand, supports the requested packing."""
    wanted, sharing, model = get("trainer.remove_padding"), get("backend.sp"), model_fields(get)
    if sharing > 1 and wanted == "never":
        yield Problem(
            "trainer.remove_padding", f"is never, but ranks share sequences (backend.sp={sharing}); set it to auto"
        )
    if model and (text := refused(wanted, sharing, model, get("model.attn_implementation"))):
        yield Problem(*text)


def refused(wanted: str, sharing: int, model: Mapping[str, object], attention: str) -> tuple[str, str] | None:
    """Return the key that requests packed sequences, and the reason why the model does not support them; None: it does.

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
    """Check that ranks can share a sequence."""
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


# The models that support sequences packed without padding, one after another in one row (`trainer.remove_padding`).


ATTENTION = "trinity_packed"
"""Name of the attention for transformers in place of sdpa, see `trinity_sync.backends.packed_attention`."""

FAMILIES = (
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "granitemoe",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Model families of transformers whose log-probs were compared, packed and padded."""


def unpackable(model: Mapping[str, object], attention: str) -> str | None:
    """Return why a model does not support packed sequences; None: it does."""
    if attention == "eager":
        return "model.attn_implementation is eager, which sees across the ends of packed sequences"
    family = model.get("model_type")
    if family not in FAMILIES:
        return f"models of the family {family} are not among those that were tried so ({', '.join(FAMILIES)})"
    layers = model.get("layer_types")
    windowed = [kind for kind in layers if kind != "full_attention"] if isinstance(layers, Sequence) else []
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    if windowed or (not layers and window is not None):
        return f"the model has layers of {windowed[0] if windowed else 'sliding_attention'}, which are padded only"
    return None


# The accelerator of a run, and verl's environment for it. The launcher calls `accelerator_count` before Ray starts, and
# passes `platform_env` to all processes.


def accelerator_count() -> int:
    """Return the number of NVIDIA GPUs that this process may use. Loads no CUDA library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if visible is not None:
        return min(devices, len([item for item in visible.split(",") if item.strip() not in ("", "-1")]))
    return devices


def platform_env(use_gpu: bool) -> dict[str, str]:
    """Return the environment variables for every process that imports verl; empty on CUDA."""
    if use_gpu:
        return {}
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "trinity_sync.backends.cpu_platform",
        "VERL_ENGINE_DEVICE": "cuda",
    }
