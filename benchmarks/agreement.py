"""How far apart log-probs of an explorer and of the trainer are where both compute the same function, and where not.

    python benchmarks/agreement.py --json [--families qwen3 gemma2] [--folders DIR ...] [--dtypes bf16 fp32] [--vllm]

The measurement is that of `explorer.check_agreement`: one rank of `fsdp2` in this process, one thread, 32 samples. Each
family of tests/families.py is made with weights as they are initialised (deviation 0.02) and with sharper ones (0.1);
a folder has the weights that it has. `hf` and `vllm` are healthy explorers, each of the others is `hf` with one fault:

- `rope_base`: the rope's base is 10,000 in place of the model's (1,000,000 in a family, which is made so);
- `wrong_class`: the rope turns neighbours, as in GLM, in place of halves; in a family with norms of queries and keys
  these are left out instead;
- `soft_cap`: caps of logits are lost; `window`: so is the sliding window;
- `dropout`: the trainer drops a tenth of what attention gives (attention_dropout=0.1).

Results are `mean` and `largest` difference of a token's log-probs, nats, and mean and deviation of the log-probs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "trinity_sync.backends.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from engines import verl_engine

from tests.families import EAGER, FAMILIES
from trinity_sync.config import compose, typed
from trinity_sync.explorer.hf import HFEngine
from trinity_sync.explorer.texts import sequence_keys
from trinity_sync.models.architecture import make_model
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import Sample
from trinity_sync.trainer.worker_spec import WorkerSpec, worker_spec

SAMPLES, PROMPTS = 32, 8
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small dog who",
    "def fibonacci(n):\n    ",
    "Question: what is 17 + 25? Answer:",
    "Water boils at a temperature of",
    "Dear Sir or Madam, I am writing to",
    "The three laws of motion say that",
    "A recipe for bread: take flour, water,",
)
SMALL = {"head_dim": 32, "vocab_size": 320, "max_position_embeddings": 256}
OTHERWISE = {"deepseek_v3": {"vocab_size": 320}}
SHARP = 0.1
BASE = 1_000_000.0


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=["qwen3", "llama", "gemma2", "gemma3_text", "qwen3_moe"])
    parser.add_argument("--folders", nargs="*", default=[], help="folders of models in Hugging Face format")
    parser.add_argument("--dtypes", nargs="*", default=["bf16", "fp32"])
    parser.add_argument("--length", type=int, default=64, help="tokens of a response (default 64)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    # verl prints
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        for name, folder, family in _models(arguments.families, arguments.folders, Path(scratch)):
            for dtype in arguments.dtypes:
                for how, gap in _measured(folder, family, dtype, arguments):
                    found[f"{name}/{dtype}/{how}"] = gap
                    print(f"{name}/{dtype}/{how}: {gap}", file=sys.stderr, flush=True)
    said = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "results": found}
    print(json.dumps(said if arguments.json else found, indent=2))


def _models(families: Sequence[str], folders: Sequence[str], scratch: Path) -> Iterator[tuple[str, Path, str]]:
    for family in families:
        fields = {"model_type": family, **FAMILIES[family], **OTHERWISE.get(family, SMALL)}
        if family not in OTHERWISE:
            fields["rope_theta"] = BASE
        for kind, more in (("initial", {}), ("sharp", {"initializer_range": SHARP})):
            name = f"{family}-{kind}"
            yield name, make_model(fields | more, 0, scratch / name), family
    for folder in folders:
        yield Path(folder).name, Path(folder), json.loads((Path(folder) / "config.json").read_text())["model_type"]


def _measured(
    folder: Path, family: str, dtype: str, arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each explorer and its gap."""
    overrides = [f"sync.wire_dtype={dtype}", f"explorer.dtype={dtype}", f"backend.param_dtype={dtype}"]
    overrides += [f"explorer.temperature={arguments.temperature}", "backend.ranks=1"]
    overrides += [*(["model.attn_implementation=eager"] if family in EAGER else [])]
    spec = worker_spec(typed(compose(overrides)), str(folder), "logs")
    trainer = _trainer(spec)
    length = arguments.length
    explorer = _explorer(spec, dtype, length)
    prompts = _prompts(explorer, made=folder.name.startswith(family))
    for how, fault in {"hf": _healthy, **_faults(explorer.model)}.items():
        with fault(explorer.model):
            batch = _sampled(explorer, prompts, arguments.temperature)
        yield how, _gap(trainer, spec, batch)
    with _dropping(trainer.module) as drops:
        if drops:
            yield "dropout", _gap(trainer, spec, _sampled(explorer, prompts, arguments.temperature))
    if arguments.vllm:
        yield "vllm", _gap(trainer, spec, _by_vllm(folder, dtype, prompts, length))


def _trainer(spec: WorkerSpec) -> Any:
    from trinity_sync.backends import lean_verl

    lean_verl.install()
    engine = verl_engine(spec)
    if spec.temperature != 1:
        spec.backend.divide_in_fp32(engine)
    return engine


def _explorer(spec: WorkerSpec, dtype: str, length: int) -> HFEngine:
    from safetensors.torch import load_file

    explorer = HFEngine(
        spec.model_path,
        dtype=dtype,
        temperature=1.0,
        batch_size=SAMPLES,
        response_length=length,
        seed=0,
        attn_implementation=spec.attn_implementation,
    )
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(spec.model_path).glob("*.safetensors")):
        weights |= load_file(file)
    for name, tensor in explorer.destinations().items():
        tensor.copy_(weights[name])
    return explorer


def _prompts(explorer: HFEngine, *, made: bool) -> list[list[int]]:
    if not made:
        return [explorer._tokenizer(text)["input_ids"] for text in TEXTS]
    draw = np.random.default_rng(0)
    return [draw.integers(3, explorer.model.config.vocab_size, 4 + row).tolist() for row in range(PROMPTS)]


def _sampled(explorer: HFEngine, prompts: list[list[int]], temperature: float) -> SampleBatch:
    each = SAMPLES // PROMPTS
    rows = np.repeat(np.arange(PROMPTS), each)
    keys = sequence_keys(0, 1, rows, np.tile(np.arange(each), PROMPTS))
    with torch.inference_mode():
        made = explorer._generate(prompts, np.full(PROMPTS, each), keys, temperature)
    bounds = made.rows.offsets
    return _batch(
        (prompts[prompt], made.rows.ids[start:stop].tolist(), made.log_probs[start:stop].tolist())
        for prompt, start, stop in zip(rows, bounds[:-1], bounds[1:], strict=True)
    )


def _by_vllm(folder: Path, dtype: str, prompts: list[list[int]], length: int) -> SampleBatch:
    from vllm import LLM, SamplingParams

    kind = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[dtype]
    llm = LLM(str(folder), dtype=kind, enforce_eager=True, max_model_len=length + 32, skip_tokenizer_init=True)
    sampling = SamplingParams(max_tokens=length, logprobs=0, n=SAMPLES // PROMPTS, seed=0, detokenize=False)
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    batch = _batch(
        (
            prompt,
            list(one.token_ids),
            [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)],
        )
        for prompt, answers in zip(prompts, done, strict=True)
        for one in answers.outputs
    )
    llm.llm_engine.engine_core.shutdown()
    return batch


def _batch(rows: Any) -> SampleBatch:
    blank = Sample(
        step=1,
        prompt=0,
        sample=0,
        prompt_ids=(),
        response_ids=(),
        log_probs=(),
        version=(0, 0),
        reward=0.0,
        exact=None,
        text="",
        finished=True,
    )
    return SampleBatch.of(
        replace(
            blank,
            prompt=row,
            prompt_ids=tuple(prompt),
            response_ids=tuple(response),
            log_probs=tuple(log_probs),
            spans=((0, len(response), 0),),
        )
        for row, (prompt, response, log_probs) in enumerate(rows)
    )


def _gap(trainer: Any, spec: WorkerSpec, batch: SampleBatch) -> dict[str, float]:
    from trinity_sync.trainer.worker import training_log_probs

    found = training_log_probs(trainer, spec, batch)
    assert found is not None
    gaps = np.abs(found.log_probs - batch.log_probs[batch.responses.positions(found.rows)])
    return {
        "mean": float(gaps.mean()),
        "largest": float(gaps.max()),
        "log_prob": float(batch.log_probs.mean()),
        "spread": float(batch.log_probs.std()),
    }


# -- faults


Fault = Callable[[Any], contextlib.AbstractContextManager[None]]


def _faults(model: Any) -> dict[str, Fault]:
    """Those that a model can have."""
    found: dict[str, Fault] = {}
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        found["rope_base"] = _rope_base
        found["wrong_class"] = _without_norms if hasattr(attentions[0], "q_norm") else _neighbours
    if getattr(model.config, "final_logit_softcapping", None):
        found["soft_cap"] = _without_caps
    if any(getattr(module, "sliding_window", None) for module in attentions):
        found["window"] = _without_windows
    return found


@contextlib.contextmanager
def _healthy(model: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _set(places: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _rope_base(model: Any) -> Iterator[None]:
    buffers = [tensor for name, tensor in model.named_buffers() if name.endswith("inv_freq")]
    before = [tensor.clone() for tensor in buffers]
    for tensor in buffers:
        tensor.copy_(10_000.0 ** (-torch.arange(len(tensor)) / len(tensor)))
    try:
        yield
    finally:
        for tensor, value in zip(buffers, before, strict=True):
            tensor.copy_(value)


def _without_norms(model: Any) -> contextlib.AbstractContextManager[None]:
    """The projections are not normed, as in the family before."""
    return _set(
        [
            (module, name, torch.nn.Identity())
            for module in model.modules()
            if hasattr(module, "q_norm")
            for name in ("q_norm", "k_norm")
        ]
    )


def _neighbours(model: Any) -> contextlib.AbstractContextManager[None]:
    source = sys.modules[type(model).__module__]

    def turned(values: torch.Tensor) -> torch.Tensor:
        return torch.stack((-values[..., 1::2], values[..., 0::2]), dim=-1).flatten(-2)

    return _set([(source, "rotate_half", turned)])


def _without_caps(model: Any) -> contextlib.AbstractContextManager[None]:
    modules = [module for module in model.modules() if hasattr(module, "attn_logit_softcapping")]
    return _set(
        [(module, "attn_logit_softcapping", None) for module in modules]
        + [(model.config, "final_logit_softcapping", None)]
    )


def _without_windows(model: Any) -> contextlib.AbstractContextManager[None]:
    types = ["full_attention"] * model.config.num_hidden_layers
    inner = model.model
    layers = [(layer, "attention_type", "full_attention") for layer in inner.layers if hasattr(layer, "attention_type")]
    windows = [(m, "sliding_window", None) for m in model.modules() if getattr(m, "sliding_window", None)]
    return _set([(model.config, "layer_types", types), *layers, *windows])


@contextlib.contextmanager
def _dropping(model: Any) -> Iterator[bool]:
    modules = [
        module for module in model.modules() if isinstance(getattr(module, "attention_dropout", None), float | int)
    ]
    with _set([(module, "attention_dropout", 0.1) for module in modules]):
        yield bool(modules)


if __name__ == "__main__":
    main()
