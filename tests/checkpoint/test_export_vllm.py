"""What `trinity-sync ckpt export` writes, loaded and run by vLLM, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tests.checkpoint import written
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.checkpoint.folder.commits import commit_folder, prepare_staging
from trinity_sync.checkpoint.folder.contents import Manifest
from trinity_sync.weights.tensors import saved_tensors, state_digest

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPT = [5, 9, 2, 14, 3, 7]
LIMIT_S = 300
# In a process of its own: vLLM's engine leaves threads and a process group behind.
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16")
    asked = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    [found] = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], asked)
    logprobs = [next(iter(one.values())).logprob for one in found.prompt_logprobs[1:]]
    print("FOUND" + json.dumps({"tokens": list(found.outputs[0].token_ids), "logprobs": logprobs}))
"""
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # so that tokens differ in their probability
}
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
}


@pytest.mark.parametrize(("family", "largest"), [("qwen3", 20_000), ("llama", 5 * 10**9)])
def test_vllm_loads_and_runs_what_is_exported(tmp_path: Path, family: str, largest: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    actor = prepare_staging(tmp_path / "run", 3, 0) / "actor"
    written.write_companions(model, actor)
    written.write_verl(actor, model.state_dict(), (2,))
    digest = state_digest(saved_tensors(model), "BF16")
    commit_folder(tmp_path / "run", Manifest(step=3, attempt=0, kind="full", digest=digest))
    export_checkpoint(tmp_path / "run" / "global_step_3", tmp_path / "out", max_shard_bytes=largest)

    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), json.dumps(PROMPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("FOUND")[-1])

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        scores = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = [float(scores[index, token]) for index, token in enumerate(PROMPT[1:])]
    assert max(expected) - min(expected) > 2
    assert len(found["tokens"]) == 8
    assert found["logprobs"] == pytest.approx(expected, abs=0.2)  # bf16 against float32
