"""What a library reads from model folders: tokens of a text, and their log-probs. Run as a program, also by a Python
that has another version of the library, so nothing of this project is imported.

    python -P tests/scores.py transformers '[[FOLDER, CLASS, ATTENTION, ADAPTER or null], ...]'
    python -P tests/scores.py vllm '[[FOLDER, DTYPE], ...]'

Prints JSON: `version` of the library, and `found`, for each folder `tokens` and the `log_probs` of all tokens but the
first, natural, in transformers computed in fp32; or `error`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

TEXT = "12=12 and 345=345, so what is 67890=?"
"""Longer than the windows of the tiny models."""


def by_transformers(folder: str, kind: str, attention: str, adapter: str | None) -> dict[str, Any]:
    """Tokens and log-probs of a model, or of a model with an adapter that peft puts on it."""
    import torch
    import transformers

    tokens = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        scores = model.eval()(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return {"tokens": tokens, "log_probs": scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()}


def by_vllm(folder: str, dtype: str) -> dict[str, Any]:
    """Tokens and log-probs of a model, computed in this process."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        llm = LLM(folder, enforce_eager=True, max_model_len=128, dtype=dtype, disable_log_stats=True)
        (done,) = llm.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0))
    finally:
        cleanup_dist_env_and_memory()
    assert done.prompt_token_ids is not None
    assert done.prompt_logprobs is not None
    log_probs = [next(iter(one.values())).logprob for one in done.prompt_logprobs[1:] if one is not None]
    return {"tokens": done.prompt_token_ids, "log_probs": log_probs}


def _said(score: Callable[..., dict[str, Any]], arguments: list[str]) -> dict[str, Any]:
    try:
        return score(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    library = __import__(sys.argv[1])
    score = by_vllm if sys.argv[1] == "vllm" else by_transformers
    found = [_said(score, arguments) for arguments in json.loads(sys.argv[2])]
    print("\n" + json.dumps({"version": library.__version__, "found": found}))
