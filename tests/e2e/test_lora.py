"""Runs that train a LoRA adapter: it alone travels, is saved and is loaded."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Run, launch
from tests.families import EXPERTS
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.checkpoint.reading import open_weights
from trinity_sync.cli.main import main
from trinity_sync.config import compose, typed
from trinity_sync.models.architecture import make_model
from trinity_sync.weights.lora import is_adapter, saved_name

BACKENDS, MODES = ("fsdp", "fsdp2"), ("checkpoint", "memory", "nccl")
SHORT = ("backend=fsdp2", "sync=checkpoint", "backend.ranks=1", "model.lora.rank=4")
"""For `test_short_runs`. Its mode is that of no other whole run that `make test` has."""
HYBRID = "backend.fsdp_size=1"
"""Of two ranks: each holds all, and the first contributes."""

CASES = [*itertools.product(BACKENDS, MODES, ["backend.ranks=2"]), ("fsdp2", "nccl", HYBRID)]


def assert_the_same_adapter_everywhere(run: Run) -> None:
    """Of three steps."""
    assert run.code == 0, run.output
    assert sorted(run.digests) == [0, 1, 2, 3]
    assert len(set(run.digests.values())) == 4
    loads = run.events("load")
    assert [load["version"] for load in loads] == [0, 1, 2, 3]
    assert all(load["digest"] == run.digests[load["version"]] for load in loads)
    # q, k, v, o, gate, up, down of two layers, in bf16
    wanted = 2 * 2 * 4 * sum((128 + 128, 128 + 64, 128 + 64, 128 + 128, 128 + 256, 128 + 256, 256 + 128))
    assert {publish["bytes_full"] for publish in run.events("publish")} == {wanted}
    run.assert_what_is_saved_is_what_was_published(last=3)


@pytest.mark.all
@pytest.mark.parametrize(("backend", "mode", "ranks"), CASES)
def test_the_adapter_is_the_same_at_trainer_explorer_and_checkpoint(
    tmp_path: Path, backend: str, mode: str, ranks: str
) -> None:
    assert_the_same_adapter_everywhere(
        launch(tmp_path / "run", f"backend={backend}", f"sync={mode}", ranks, "model.lora.rank=4")
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has begun to learn the default task: it earns half of what there is to earn. On random weights, with
    embeddings that stay random, an adapter would need hundreds of steps.
    """
    folder = tmp_path_factory.mktemp("base")
    run = launch(folder / "run", "backend.ranks=1", "trainer.steps=50", "checkpoint.interval=50", small=False)
    assert run.code == 0, run.output
    export_checkpoint(folder / "run/checkpoints/global_step_50", folder / "model")
    return folder / "model"


def learn(folder: Path, base: Path, *overrides: str) -> Run:
    """Train an adapter on this base; 40 steps."""
    settings = ["backend.ranks=1", "model.lora.rank=16", "trainer.lr=5e-3", "trainer.steps=40"]
    run = launch(folder, "model=path", f"model.path={base}", *settings, *overrides, small=False)
    assert run.code == 0, run.output
    return run


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Run:
    return learn(tmp_path_factory.mktemp("learnt") / "run", base, "sync=memory")


@pytest.mark.all
def test_an_adapter_learns_the_default_task(learnt: Run) -> None:
    assert learnt.summary["reward_last"] > learnt.summary["reward_first"] + 0.05


@pytest.mark.all
@pytest.mark.parametrize("mode", ["checkpoint", "nccl"])
def test_it_learns_the_same_in_every_mode(learnt: Run, base: Path, tmp_path: Path, mode: str) -> None:
    run = learn(tmp_path / "run", base, f"sync={mode}")
    assert run.digests == learnt.digests
    assert run.summary["reward_last"] == learnt.summary["reward_last"]


@pytest.mark.all
def test_what_is_exported_computes_what_was_trained_and_is_gone_on_from(
    learnt: Run, base: Path, tmp_path: Path
) -> None:
    step = learnt.folder / "checkpoints/global_step_40"
    tokens = torch.tensor([[5, 8, 13]])
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    for output, form in ((adapter, "--adapter"), (merged, "--merged")):
        assert main(["ckpt", "export", str(step), "--output", str(output), form, "--dtype", "fp32"]) == 0
    trained = open_weights(step)
    assert open_weights(adapter).digest(None) == trained.digest(None)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = model(tokens).logits
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    held = {name: tensor for name, tensor in adapted.state_dict().items() if is_adapter(name)}
    assert {saved_name(name) for name in held} == set(trained)
    assert all(torch.equal(tensor, trained.read(saved_name(name))) for name, tensor in held.items())
    assert not torch.allclose(adapted(tokens).logits, plain, atol=0.1)
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert torch.equal(whole(tokens).logits, adapted.merge_and_unload()(tokens).logits)

    run = launch(tmp_path / "run", "model=path", f"model.path={base}", f"model.lora.path={adapter}", "backend.ranks=1")
    assert run.code == 0, run.output
    assert run.digests[0] == learnt.digests[40]

    refused = launch(tmp_path / "other", f"model.lora.path={adapter}", "backend.ranks=1")
    assert refused.code == 2
    known = learnt.manifests[40]["base"]["digest"]
    assert f"{adapter} was trained on a base with the digest {known}" in " ".join(refused.output.split())


@pytest.mark.all
def test_a_base_with_tensors_in_fp32_and_draft_heads_is_exported_as_it_is_published(tmp_path: Path) -> None:
    folder = make_model(typed(compose()).model.architecture or {}, 0, tmp_path / "model")
    drafts = {"model.layers.2.eh_proj.weight": torch.randn(4, 8)}
    save_file(load_file(folder / "model.safetensors") | drafts, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    settings = [
        "backend.ranks=1",
        "model.lora.rank=4",
        "sync.what=merged",
        "sync.keep_fp32=[norm]",
        "explorer.dtype=fp32",
    ]
    run = launch(tmp_path / "run", "model=path", f"model.path={folder}", *settings)
    assert run.code == 0, run.output
    done = export_checkpoint(run.folder / "checkpoints/global_step_3", tmp_path / "merged", form="merged")
    assert (done.digest, done.left_out, done.missing) == (run.digests[3], tuple(drafts), ())
    exported = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in drafts.items())
    assert {tensor.dtype for name, tensor in exported.items() if "norm" in name} == {torch.float32}


@pytest.mark.all
@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_a_mixture_s_adapter_is_trained_sent_and_merged(tmp_path: Path, what: str) -> None:
    run = launch(tmp_path / "run", *EXPERTS, "backend.ranks=1", "model.lora.rank=4", f"sync.what={what}")
    assert run.code == 0, run.output
    assert "leaves out fused experts (mlp.experts); routers (mlp.gate)" in run.output
    assert [load["digest"] for load in run.events("load")] == [run.digests[version] for version in range(4)]
    done = export_checkpoint(run.folder / "checkpoints/global_step_3", tmp_path / "merged", form="merged")
    assert what == "adapter" or done.digest == run.digests[3]
