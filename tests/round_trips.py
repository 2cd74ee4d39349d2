"""Tiny models of all families through whole runs and back: which trainers and explorers take a family, what becomes of
the files of its folder, and who loads what is exported.

The results are committed (`round_trips.json`), and docs/models.md shows them. To try families anew, all where none is
named, two minutes each; the Python of `TRANSFORMERS_4`, an environment with transformers 4, loads the exports, too::

    TRANSFORMERS_4=/path/to/python python -m tests.round_trips [FAMILY ...] && python -m docs.families
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig

from tests import scores
from tests.chat_models import byte_tokenizer
from tests.e2e.runs import Run, launch
from tests.families import EAGER, FAMILIES, REFUSED, WITH_IMAGES
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.checkpoint.reading import open_weights
from trinity_sync.models.families import auto_class
from trinity_sync.models.files import ModelFiles
from trinity_sync.weights.tensors import saved_tensors

RESULTS = Path(__file__).with_name("round_trips.json")
BACKENDS, EXPLORERS = ("fsdp2", "megatron"), ("hf", "vllm")
CELLS = {f"{backend} {explorer}": (backend, explorer) for backend in BACKENDS for explorer in EXPLORERS}
HEALTHY = 0.02
"""Mean difference of log-probs of explorer and trainer, natural, of tiny models in bf16."""
SAME = 2e-4
"""Largest difference of a log-prob between two programs that compute in fp32."""
IN_BF16 = {"qwen3_next", "qwen3_5", "deepseek_v3"}
"""Families that vLLM does not compute in fp32 throughout on a CPU: linear attention, latent attention."""
_LIMIT_S = 1800
_HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
_SIZES = _HEADS | {"head_dim": 32, "vocab_size": 320, "max_position_embeddings": 256}
_OTHERWISE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 2, "n_positions": 256},
    "deepseek_v3": {"num_key_value_heads": 2, "initializer_range": 0.05, "topk_method": "noaux_tc"}
    | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "qwen3_next": {"initializer_range": 0.05, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
"""The two with the smaller range are more sensitive to bf16: in fp32 both sides agree to 0.000001."""
_AS_PUBLISHED = {"rope_theta": 500000.0, "initializer_range": 0.1, "transformers_version": "4.46.3", "use_cache": True}


def model_folder(family: str, folder: Path) -> Path:
    """Write a model of a family as people publish them: the keys of transformers 4, weights in fp32, and files that
    transformers would not write so.
    """
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    fields = _fields(family) | {
        "model_type": family,
        "bos_token_id": None,
        "pad_token_id": ends[1],
        "eos_token_id": ends,
    }
    _write(folder / "config.json", fields)
    if family not in REFUSED:
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(folder)
        model = getattr(transformers, auto_class({"model_type": family})).from_config(config, dtype=torch.float32)
        fields |= {"architectures": [type(model).__name__], "torch_dtype": "float32"}
        for parameter in model.parameters():  # transformers begins norms with ones, and biases with zeros
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    else:
        fields |= {"architectures": ["AForConditionalGeneration"]}
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    _write(folder / "config.json", fields)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token, "clean_up": None}
    _write(folder / "tokenizer_config.json", said | {"pad_token": tokenizer.pad_token})
    (folder / "chat_template.jinja").write_text(f"{{# ours #}}{tokenizer.chat_template}")
    _write(folder / "generation_config.json", {"do_sample": False, "temperature": 0.6, "eos_token_id": ends, "x": 1})
    (folder / "LICENSE").write_bytes(b"as it is\r\n")
    (folder / "parts").mkdir()
    (folder / "parts/modeling_own.py").write_text("LAYERS = 2\n")
    return folder


def _fields(family: str) -> dict[str, Any]:
    if family in WITH_IMAGES:
        fields = json.loads(json.dumps(WITH_IMAGES[family]))
        text = fields["text_config"]
        text |= {"rope_theta": 500000.0, "initializer_range": 0.1}
        if "rope_scaling" in text:
            text["rope_scaling"]["rope_theta"] = 500000.0
        fields["tie_word_embeddings"] = family == "gemma3"  # each version of transformers has another default
        return fields
    if family in REFUSED:
        return {}
    own = FAMILIES[family]
    sizes = {name: value for name, value in _SIZES.items() if name in own}
    return own | sizes | _AS_PUBLISHED | _OTHERWISE.get(family, {})


def _write(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=1))


def results_of(families: Sequence[str]) -> dict[str, Any]:
    """Try families.

    Returns:
        By family: ``runs``, by cell of `CELLS` and for an adapter: ``yes``, or what refuses it. ``files``, by what was
        exported: the files beside the weights that are not as they came, and keys of config.json. ``loads``, by library
        and what was exported: ``yes``, or what it says.
    """
    with tempfile.TemporaryDirectory() as temporary:
        tried = {family: _tried(family, Path(temporary) / family) for family in families}
        loads = _loads([export for one in tried.values() for export in one.exports])
        return {
            family: {"runs": one.runs, "files": _files(one.exports), "loads": loads.get(family, {})}
            for family, one in tried.items()
        }


@dataclass(frozen=True)
class Export:
    """What was exported of a family: ``fsdp2`` or ``megatron`` (by that backend), ``adapter`` or ``merged``."""

    family: str
    name: str
    model: Path
    folder: Path

    @property
    def job(self) -> list[str | None]:
        """Arguments of `scores.by_transformers`."""
        kind = auto_class(json.loads((self.model / "config.json").read_text()))
        adapter = str(self.folder) if self.name == "adapter" else None
        return [str(self.model if adapter else self.folder), kind, _attention(self.family), adapter]

    @property
    def job_of_vllm(self) -> list[str | None]:
        """Arguments of `scores.by_vllm`."""
        return [str(self.folder), "bfloat16" if self.family in IN_BF16 else "float32"]


class Tried(NamedTuple):
    """Outcomes of a family's runs, and what was exported of them."""

    runs: dict[str, str]
    exports: list[Export]


def _tried(family: str, folder: Path) -> Tried:
    model = model_folder(family, folder / "model")
    runs: dict[str, str] = {}
    exports: list[Export] = []
    for cell, (backend, explorer) in CELLS.items():
        run = _run(folder / cell.replace(" ", "-"), family, model, f"backend={backend}", f"explorer={explorer}")
        runs[cell] = _outcome(run, model)
        if runs[cell] == "yes" and explorer == "hf":
            exports.append(Export(family, backend, model, _exported(run)))
    if exports:
        run = _run(folder / "adapter", family, model, "model.lora.rank=4", "model.lora.alpha=64")
        runs["adapter"] = _outcome(run, model)
        if runs["adapter"] == "yes":
            adapter, merged = _exported(run), folder / "merged"
            export_checkpoint(adapter, merged, form="merged", base=model, dtype="fp32")
            exports += [Export(family, "adapter", model, adapter), Export(family, "merged", model, merged)]
    return Tried(runs, exports)


def _files(exports: Sequence[Export]) -> dict[str, list[str]]:
    return {one.name: changed(one.model, one.folder) for one in exports if one.name != "adapter"}


def _attention(family: str) -> str:
    return "eager" if family in EAGER else "sdpa"


def _run(folder: Path, family: str, model: Path, *overrides: str) -> Run:
    """Two steps of GRPO, by a reward that differs from sample to sample."""
    folder.mkdir()
    (folder / "lengths.py").write_text("def varied(prompt, response):\n    return sum(map(ord, response)) % 5\n")
    rows = [json.dumps({"prompt": f"{n}=", "answer": f"{n}"}) for n in range(10, 42)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    task = ["task=jsonl", f"task.path={folder}/prompts.jsonl", "task.response_length=8", "task.prompt_length=64"]
    reward = ["task.reward._target_=lengths.varied", "trainer.lr=0.01", "trainer.steps=2", "trainer.weight_decay=0"]
    attention = f"model.attn_implementation={_attention(family)}"
    return launch(folder / "run", *task, *reward, f"model.path={model}", attention, "backend.ranks=1", *overrides)


def _outcome(run: Run, model: Path) -> str:
    """``yes`` where a run was healthy, else the first line of what it says."""
    if run.code != 0:
        lines = iter([*run.output.splitlines(), "", ""])
        said = next((line for line in lines if line.startswith("error: ")), run.output[-500:])
        said = _with_detail(said.removeprefix("error: "), next(lines)).replace(str(model), "DIR")
        return f"{'refused' if run.code == 2 else 'FAILED'}: {said}"
    assert run.events("load"), "explorers took versions"
    assert all(event["digest"] == run.digests[event["version"]] for event in run.events("load"))
    assert run.manifests[2]["digest"] == run.digests[2] != run.digests[0]
    apart = max(line["rollout_corr/log_prob_abs_diff"] for line in run.lines("metrics.jsonl"))
    return "yes" if apart < HEALTHY else f"FAILED: log-probs are {apart:.3f} apart"


def _with_detail(first: str, second: str) -> str:
    """An error whose first line only announces what the second says."""
    if first.endswith("settings are wrong:"):
        return second.strip()
    detail = second.strip().partition(" [type=")[0] if second.startswith("  ") else ""
    return f"{first}: {detail}" if detail else first


def _exported(run: Run) -> Path:
    """Export the last checkpoint of a run."""
    output = run.folder.with_name("exported")
    done = export_checkpoint(run.folder / "checkpoints/global_step_2", output)
    assert done.digest == done.checked == run.digests[2]
    return output


def _loads(exports: Sequence[Export]) -> dict[str, dict[str, dict[str, str]]]:
    """Have each library load what was exported, and compare it with the model of the source folder, with the trained
    weights put in: by family, library and name.
    """
    wanted = {(one.family, one.name): _trained(one) for one in exports if one.name != "adapter"}
    wanted |= {(family, "adapter"): found for (family, name), found in wanted.items() if name == "merged"}
    asked = [(python, "transformers", exports) for python in (sys.executable, os.environ.get("TRANSFORMERS_4"))]
    asked.append((sys.executable, "vllm", [one for one in exports if one.name in BACKENDS]))
    found: dict[str, dict[str, dict[str, str]]] = {}
    for python, library, of_library in asked:
        if python is None or not of_library:
            continue
        jobs = [one.job if library == "transformers" else one.job_of_vllm for one in of_library]
        version, said = _said(python, library, jobs)
        for one, answer in zip(of_library, said, strict=True):
            rounded = library == "vllm" and one.family in IN_BF16
            compared = _compared(answer, wanted[one.family, one.name], rounded=rounded)
            found.setdefault(one.family, {}).setdefault(version, {})[one.name] = compared
    return found


def changed(model: Path, exported: Path) -> list[str]:
    """What differs between the files beside the weights of two folders: keys of config.json, names of other files."""
    came, went = (ModelFiles.read(folder).contents for folder in (model, exported))
    names = [name for name in sorted(came.keys() | went.keys()) if came.get(name) != went.get(name)]
    if "config.json" not in names:
        return names
    texts = [contents["config.json"].decode().splitlines() for contents in (came, went)]
    lines = [one for one, other in zip(*texts, strict=True) if one != other]
    keys = [line.split('"')[1] for line in lines]
    return [*(name for name in names if name != "config.json"), *(f"config.json: {key}" for key in dict.fromkeys(keys))]


def _trained(export: Export) -> dict[str, Any]:
    """Tokens and log-probs by the model of the source folder, with the exported weights put in."""
    _, kind, attention, _ = export.job
    made = getattr(transformers, str(kind))
    held = made.from_pretrained(export.model, dtype=torch.float32, attn_implementation=attention).eval()
    weights, destinations = open_weights(export.folder), saved_tensors(held)
    assert set(weights) == set(destinations)
    for name, tensor in destinations.items():
        tensor.data.copy_(weights.read(name))
    tokens = byte_tokenizer()(scores.TEXT)["input_ids"]
    with torch.inference_mode():
        found = held(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
    return {"tokens": tokens, "log_probs": found[:, 0].tolist()}


def _said(python: str, library: str, jobs: list[list[str | None]]) -> tuple[str, list[dict[str, Any]]]:
    """Name and version of a library, and what `scores` says of each job."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = subprocess.run(
        [python, "-P", scores.__file__, library, json.dumps(jobs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return f"{library} {said['version']}", said["found"]


def _compared(found: Mapping[str, Any], wanted: Mapping[str, Any], *, rounded: bool) -> str:
    """``yes`` where tokens and log-probs are equal, on average where they are of numbers in bf16; else what differs."""
    if "error" in found:
        return f"no: {_with_detail(*[*found['error'].splitlines(), ''][:2])}"
    if found["tokens"] != wanted["tokens"]:
        return "FAILED: other tokens"
    apart = [abs(a - b) for a, b in zip(found["log_probs"], wanted["log_probs"], strict=True)]
    if rounded and sum(apart) / len(apart) < HEALTHY:
        return "yes, in bf16"
    return "yes" if max(apart) < SAME else f"FAILED: log-probs are up to {max(apart):.2g} apart"


def main(families: list[str]) -> None:
    """Try families, all where none is named, and write the results."""
    everything = [*FAMILIES, *WITH_IMAGES, *REFUSED]
    found = results_of(families or everything)
    known = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | found
    ordered = {family: known[family] for family in everything if family in known}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
