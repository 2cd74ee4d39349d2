"""The reference that a policy is held near to: a second engine of verl's in the trainer's ranks, which infers only; of
a LoRA adapter, its base.
"""

from __future__ import annotations

from dataclasses import replace

from tensordict import TensorDict
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from trinity_sync.backends.engines import Engine, FsdpEngine
from trinity_sync.backends.lora import adapter_off
from trinity_sync.backends.saved import check_class, left_out_by
from trinity_sync.checkpoint.export_checks import digest_left_out
from trinity_sync.checkpoint.reading import WeightsError
from trinity_sync.checkpoint.reading.hugging_face import open_hugging_face
from trinity_sync.errors import ConfigError
from trinity_sync.models.hub import local_folder
from trinity_sync.trainer.log_probs import with_log_probs
from trinity_sync.trainer.spec import WorkerSpec


class ReferenceModel:
    """A model that stays as it is.

    Args:
        config: of verl's worker, as `reference_spec` asks for it. Building it is collective.
        path: the folder or hub id that it names, for errors.
        vocabulary: how many tokens the trained model has.

    Raises:
        ConfigError: it has another vocabulary, or is no causal language model, or its folder lacks some of its
            tensors.
    """

    def __init__(self, config: TrainingWorkerConfig, path: str, vocabulary: int) -> None:
        worker = TrainingWorker(config)
        self.engine: Engine = worker.engine
        try:
            check_class(self.engine.model_config)
            left_out_by(self.engine.model_config, local_folder(path))  # on each rank, so that all of them refuse
        except ConfigError as error:
            raise ConfigError(f"algorithm.kl.reference={path} cannot be used: {error}") from error
        tokens = self.engine.model_config.hf_config.vocab_size
        if tokens != vocabulary:
            raise ConfigError(
                f"algorithm.kl.reference={path} has a vocabulary of {tokens} tokens, the trained model one of "
                f"{vocabulary}; a reference has to give the same tokens a probability"
            )
        worker.reset()

    def compared(self, data: TensorDict) -> TensorDict:
        """Return a rank's share of a step with the reference's log-probs as `ref_log_prob`. Collective."""
        return with_log_probs(self.engine, data, "ref_log_prob")


class BaseOfAdapter:
    """The base of the adapter that is trained: the trained engine with the adapter off.

    Args:
        engine: that trains the adapter.
    """

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def compared(self, data: TensorDict) -> TensorDict:
        """Return a rank's share of a step with the base's log-probs as `ref_log_prob`. Collective."""
        return with_log_probs(self._engine, data, "ref_log_prob", adapter_off(self._engine.module))


def reference_spec(spec: WorkerSpec, path: str) -> WorkerSpec:
    """Return what the engine of a reference is built from: as the trained one, and it infers only.

    Args:
        path: folder or hub id of the reference.
    """
    return replace(
        spec,
        model_path=path,
        engine=spec.backend.reference_fields(spec.engine),
        lora={},
        gradient_checkpointing=False,
    )


def reference_digest(path: str) -> str:
    """Compute the digest of a reference's weights as they are stored, hex. Reads all of them.

    Raises:
        ConfigError: they cannot be read.
    """
    folder = local_folder(path)
    try:
        tensors = open_hugging_face(folder)
        return digest_left_out(tensors, sorted(tensors))
    except (WeightsError, OSError) as error:
        raise ConfigError(f"algorithm.kl.reference={path}: {error}") from error
