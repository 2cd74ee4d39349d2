"""What the tests of vLLM's engines share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.explorer.helpers import loaded
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.tasks.copy_digits import CopyDigits

TASK = CopyDigits(3, 0)
PROMPTS = TASK.prompts(1, 4)

Weights = dict[str, torch.Tensor]


def log_probs_of_transformers(path: Path, batch: SampleBatch) -> np.ndarray:
    """Log-probabilities that transformers, with the weights of a folder, gives the tokens of samples."""
    model = loaded(path, dtype="bf16").model
    found = []
    for row in range(len(batch)):
        prompt = batch.prompt_rows.row(int(batch.prompt_of[row]))
        response = batch.responses.row(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy())
    return np.concatenate(found)
