"""A model that comes with more than transformers would write comes back as it came, also where its folder is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import start
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.checkpoint.reading import open_weights
from trinity_sync.models.architecture import make_model
from trinity_sync.models.files import ModelFiles

pytestmark = pytest.mark.all

CODE = {
    "configuration_mine.py": "from transformers import Qwen3Config\n\n\nclass MineConfig(Qwen3Config):\n"
    "    model_type = 'mine'\n",
    "modeling_mine.py": "from transformers import Qwen3ForCausalLM\n\nfrom .configuration_mine import MineConfig\n\n\n"
    "class MineForCausalLM(Qwen3ForCausalLM):\n    config_class = MineConfig\n",
}
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with code of its own, the keys of transformers 4, several ends, and sampling that is off."""
    folder = make_model(
        {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, **SIZES}, 1, tmp_path / "model"
    )
    body = json.loads((folder / "config.json").read_text())
    del body["rope_parameters"]
    del body["dtype"]
    names = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    body |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": names}
    body |= {"rope_theta": 1e6, "eos_token_id": [2, 3], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(body))
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": [2, 3]}')
    for name, text in CODE.items():
        (folder / name).write_text(text)
    (folder / "LICENSE").write_text("as it is")
    return folder


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
def test_checkpoint_and_export_have_the_files_of_a_folder_that_is_gone(
    tmp_path: Path, model: Path, backend: str
) -> None:
    came = ModelFiles.read(model)
    settings = ["model.trust_remote_code=true", f"backend={backend}", "backend.ranks=1", "trainer.steps=6"]
    started = start(tmp_path / "run", f"model.path={model}", "checkpoint.interval=1", *settings)
    started.wait_for_event(lambda event: event["event"] == "commit")
    shutil.rmtree(model)
    run = started.finish()
    assert run.code == 0, run.output
    step = run.folder / "checkpoints" / "global_step_6"
    assert ModelFiles.read(step / "actor" / "huggingface") == came
    export_checkpoint(step, tmp_path / "out")
    assert ModelFiles.read(tmp_path / "out") == came
    export_checkpoint(step, tmp_path / "wide", dtype="fp32")
    assert ModelFiles.read(tmp_path / "wide") == came.with_dtype("float32") != came
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(loaded).__name__ == "MineForCausalLM"
    assert len(open_weights(tmp_path / "out")) == len(loaded.state_dict())
