"""Loss, entropy and gradient of a real engine, tensor by tensor under Hugging Face's names, against those by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

TEMPERATURE = 0.7
COEFFICIENTS = (0.0, 0.5)
LENGTHS = ((5, 9), (9, 3), (7, 6), (2, 10))
"""Of prompt and response of each sequence of a rank."""


def gradients(engine: Any, model: Path, longer: int = 0, **batching: Any) -> list[dict[str, Any]]:
    """Compare GRPO's gradient with and without an entropy bonus. Collective; changes nothing of the engine.

    Args:
        engine: verl's, initialised, with the weights of `model`.
        model: a folder.
        longer: tokens that the responses of a data-parallel rank have more than those of the one before.
        batching: of `grpo_batch`, in place of two sequences in a micro-batch.

    Returns:
        For each coefficient of the bonus: ``wanted`` (loss and entropy, by hand); where the rank computes them,
        ``found``, the rank's own share; and ``off``, see `_off`, but with data-parallel ranks of Megatron, of which
        each ends up with a part of the sum.
    """
    from trinity_sync.config import compose, typed
    from trinity_sync.trainer.algorithms.base import algorithm_of
    from trinity_sync.trainer.training_batch import grpo_batch

    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    reference, samples = _reference(engine, model), [_samples(engine, of, of * longer) for of in range(ranks)]
    olds = [[_log_probs(reference, *sample)[0].detach() for sample in of_rank] for of_rank in samples]
    prompts, responses, advantages = zip(*samples[rank], strict=True)
    facts = []
    for coefficient in COEFFICIENTS:
        algorithm = algorithm_of(typed(compose([f"algorithm.entropy_coeff={coefficient}"])).algorithm)
        data = grpo_batch(
            prompts,
            responses,
            [old.numpy() for old in olds[rank]],
            advantages,
            temperature=TEMPERATURE,
            **{"micro_batch": 2, "global_mini_batch": len(LENGTHS) * ranks} | batching,
            entropy=algorithm.needs_entropy,
        )
        wanted = _by_hand(reference, coefficient, list(chain(*samples)), list(chain(*olds)))
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, algorithm.loss("fsdp2"))
            with _gradients_as_weights(engine):
                found = {name: tensor.detach().float().clone() for name, tensor in engine.get_per_tensor_param()[0]}
        of_one: dict[str, Any] = {"wanted": wanted}
        if output:
            metrics = {name: metric.aggregate() for name, metric in output["metrics"].items()}
            of_one["found"] = {"loss": sum(output["loss"]), "entropy": metrics.get("actor/entropy_loss")}
        if ranks == 1 or not isinstance(engine.module, list):
            of_one["off"] = _off(found, {name: weight.grad for name, weight in reference.named_parameters()})
        facts.append(of_one)
    return facts


def decays(engine: Any) -> list[float]:
    """The weight decays of the optimizer's groups that have weights."""
    return sorted({group["weight_decay"] for group in engine.optimizer.param_groups if group["params"]})


def passing_over(engine: Any, weights: Callable[[], str]) -> dict[str, bool]:
    """Take an optimizer's step with a gradient that is not finite. Collective; changes nothing of the engine.

    Args:
        engine: verl's, initialised.
        weights: their digest.

    Returns:
        ``finite``: whether the step gave a norm. ``kept``: whether the weights are as they were.
    """
    import math

    import torch
    from verl.workers.utils.losses import sft_loss

    from trinity_sync.trainer.training_batch import sft_batch

    before, samples = weights(), _samples(engine, engine.get_data_parallel_rank())
    prompts, responses, _ = zip(*samples, strict=True)
    size = len(samples) * engine.get_data_parallel_size()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(
            sft_batch(prompts, responses, micro_batch=2, global_mini_batch=size), partial(sft_loss, None)
        )
        with torch.no_grad():
            _gradient(_parameters(engine)[0]).fill_(math.inf)
        norm = engine.optimizer_step()
    return {"finite": math.isfinite(norm), "kept": weights() == before}


def assert_as_by_hand(ranks: list[list[dict[str, Any]]]) -> None:
    """Hold what the ranks of a layout have found against what is to be."""
    import numpy as np
    import pytest

    for number, coefficient in enumerate(COEFFICIENTS):
        of_ranks = [rank[number] for rank in ranks]
        wanted, found = of_ranks[0]["wanted"], [rank["found"] for rank in of_ranks if "found" in rank]
        assert np.mean([rank["loss"] for rank in found]) == pytest.approx(wanted["loss"], abs=1e-2)
        if coefficient:
            assert np.mean([rank["entropy"] for rank in found]) == pytest.approx(wanted["entropy"], rel=5e-3)
        else:
            assert {rank["entropy"] for rank in found} == {None}, "it is computed though nobody asked"
        for rank in of_ranks:
            for name, off in rank.get("off", {}).items():
                assert off < 0.05, name


def _off(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, float]:
    """How far the gradient of each tensor is from what it is to be, as a share of that; where it is tiny, and what bf16
    makes of it is noise, of a hundredth of the whole gradient.
    """
    import torch

    least = 0.01 * torch.nn.utils.get_total_norm(wanted.values())
    return {
        name: float((_as_held(found, name, len(of_one)) - of_one).norm() / of_one.norm().clamp(least))
        for name, of_one in wanted.items()
    }


def _as_held(found: Mapping[str, Any], name: str, experts: int) -> Any:
    """A tensor as transformers holds it: those of a layer's experts together, which are exported one by one."""
    import torch

    if name in found:
        return found[name]
    layer, _, held = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[held]
    return torch.stack(
        [torch.cat([found[f"{layer}.{number}.{part}.weight"] for part in parts]) for number in range(experts)]
    )


def _samples(engine: Any, rank: int, longer: int = 0) -> list[tuple[Any, Any, float]]:
    """Prompt, response and advantage of each sequence of a rank; the padding token is among their tokens."""
    import numpy as np

    draw, tokens = np.random.default_rng([11, rank]), engine.model_config.hf_config.vocab_size
    samples = [(draw.integers(0, tokens, a), draw.integers(0, tokens, b + longer), draw.normal()) for a, b in LENGTHS]
    samples[0][1][2] = engine.model_config.hf_config.pad_token_id
    return samples


def _reference(engine: Any, model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    pad = engine.model_config.hf_config.pad_token_id
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", pad_token_id=pad
    )


def _log_probs(reference: Any, prompt: Any, response: Any, _: float) -> tuple[Any, Any]:
    """Log-probs of the response's tokens, and the entropy at each."""
    import numpy as np
    import torch

    ids = torch.from_numpy(np.concatenate([prompt, response]))
    every = (reference(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1]
    return every.gather(-1, ids[len(prompt) :, None])[:, 0], -(every.exp() * every).sum(-1)


def _by_hand(
    reference: Any, coefficient: float, samples: list[tuple[Any, Any, float]], olds: list[Any]
) -> Mapping[str, float]:
    """Loss and entropy as means over all tokens; leaves the gradient in the reference."""
    reference.zero_grad()
    tokens = sum(len(response) for _, response, _ in samples)
    found = [_log_probs(reference, *sample) for sample in samples]
    entropy = sum(of_one.sum() for _, of_one in found) / tokens
    gain = sum(
        (advantage * (now - old).exp()).sum()
        for (now, _), old, (*_, advantage) in zip(found, olds, samples, strict=True)
    )
    loss = -gain / tokens - coefficient * entropy
    loss.backward()
    return {"loss": loss.item(), "entropy": entropy.item()}


@contextmanager
def _gradients_as_weights(engine: Any) -> Iterator[None]:
    """Inside, what exports the weights exports their gradients."""
    import torch

    parameters = _parameters(engine)
    weights = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(_gradient(parameter))
        yield
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


def _parameters(engine: Any) -> list[Any]:
    chunks = engine.module if isinstance(engine.module, list) else [engine.module]
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def _gradient(parameter: Any) -> Any:
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
