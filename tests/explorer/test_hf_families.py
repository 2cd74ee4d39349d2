"""The transformers explorer with a model of each family: prompts of several lengths, several samples of each, and the
log-probabilities that the model gives without cache and padding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.explorer.helpers import engine_of
from tests.families import EAGER, FAMILIES, architecture
from trinity_sync.checkpoint.reading import open_weights
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.hf import HFEngine
from trinity_sync.models.architecture import make_model
from trinity_sync.samples.record import Prompt, Sample
from trinity_sync.tasks.copy_digits import CopyDigits

OFTEN = {"gemma3_text", "qwen3_next"}
"""What `make test` runs: a cache of a sliding window, and one of linear attention."""

CASES = [pytest.param(family, marks=() if family in OFTEN else pytest.mark.all) for family in FAMILIES]
TEXTS = ["1=", "12345=", "61=", "00000000000000="]
PROMPTS = [Prompt(index=index, text=text, answer="") for index, text in enumerate(TEXTS)]


@pytest.mark.parametrize("family", CASES)
def test_a_family_generates_what_it_computes_without_a_cache(tmp_path: Path, family: str) -> None:
    path = make_model(architecture(family) | {"initializer_range": 0.3}, 0, tmp_path / "model")
    engine = engine_of(path, response_length=12, attn_implementation="eager" if family in EAGER else "sdpa")
    weights, destinations = open_weights(path), engine.destinations()
    assert set(weights) == set(destinations)
    for name, tensor in destinations.items():
        tensor.copy_(weights.read(name))
    engine.after_load()
    samples = engine.generate(PROMPTS, CopyDigits(2, 0), step=1, samples_per_prompt=3, version=(0, 0))
    assert len({sample.response_ids for sample in samples}) > len(PROMPTS)
    for sample in samples:
        np.testing.assert_allclose(sample.log_probs, _log_probs(engine, sample), atol=1e-4)


def _log_probs(engine: HFEngine, sample: Sample) -> np.ndarray:
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    with torch.inference_mode():
        logits = engine.model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    chosen = torch.tensor(sample.response_ids)[:, None]
    return torch.log_softmax(logits.float(), -1).gather(1, chosen)[:, 0].numpy()


def test_an_attention_that_the_family_does_not_have_is_refused_by_its_key(tmp_path: Path) -> None:
    path = make_model(architecture("gpt_oss"), 0, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.attn_implementation is sdpa.*gpt_oss.*set model\.attn_imp.*=eager"):
        engine_of(path)
