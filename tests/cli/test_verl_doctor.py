"""`trinity-sync verl doctor`: what would be ours, what is in the way, and what has no meaning."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.cli import main as cli
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.doctor import CALLBACK, ENGINES, MODULES, PLUGIN, PLUGINS, PackageFinding, findings

ON = {MODULES: f"mine,{PLUGIN}", ENGINES: "trinity"}
CALLBACK_KEY = "trainer.checkpoint_callback_class"
CONTENTS = ["model", "optimizer", "extra"]
SFT = {
    "engine": {},
    "engine.strategy": "fsdp2",
    "checkpoint.save_contents": CONTENTS,
    "checkpoint.load_contents": CONTENTS,
    "trainer.device": "cuda",
    "trainer.save_freq": 5,
    "trainer.default_local_dir": "checkpoints/a",
    "trainer.resume_mode": "auto",
}
ACTOR = "actor_rollout_ref.actor"
SYNC = "actor_rollout_ref.rollout.checkpoint_engine"
PPO = {
    **{key: value for key, value in SFT.items() if key.startswith("trainer.")},
    "actor_rollout_ref": {},
    f"{ACTOR}.strategy": "megatron",
    f"{ACTOR}.checkpoint.save_contents": CONTENTS,
    f"{ACTOR}.checkpoint.load_contents": CONTENTS,
    "critic.strategy": "fsdp",
    "critic.checkpoint.save_contents": CONTENTS,
    "critic.checkpoint.load_contents": CONTENTS,
    "algorithm.adv_estimator": "grpo",
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    f"{SYNC}.backend": "naive",
}


def found(
    config: dict[str, object], environment: dict[str, str] = ON, version: str | None = "0.9.1"
) -> list[PackageFinding]:
    return list(findings(config.get, environment, version))


@pytest.mark.parametrize("config", [SFT, PPO, {**SFT, "trainer.save_freq": "after_each_epoch"}])
def test_a_program_that_would_use_us_has_nothing_in_the_way(config: dict[str, object]) -> None:
    told = found(config)
    assert not [one for one in told if one.state == "stops"]
    assert {"verl", MODULES, ENGINES, "trainer.resume_mode"} <= {one.subject for one in told if one.state == "ours"}


@pytest.mark.parametrize(
    ("config", "changes", "subject"),
    [
        (SFT, {"engine.strategy": "torchtitan"}, "engine.strategy"),
        (SFT, {"trainer.device": "npu"}, "trainer.device"),
        (SFT, {"trainer.default_local_dir": "hdfs://a/b"}, "trainer.default_local_dir"),
        (SFT, {"checkpoint.async_save": True}, "checkpoint.async_save"),
        (SFT, {"engine.strategy": "megatron", "engine.use_megatron_fsdp": True}, "engine.use_megatron_fsdp"),
        (SFT, {"model.lora_rank": 8, "checkpoint.save_contents": [*CONTENTS, "hf_model"]}, "checkpoint.save_contents"),
        (PPO, {"actor_rollout_ref.model.lora.rank": 8}, "actor_rollout_ref.model.lora.rank"),
        (PPO, {"critic.strategy": "veomni", "algorithm.adv_estimator": "gae"}, "critic.strategy"),
        (PPO, {"trainer.save_freq": -1}, "trainer.save_freq"),
        (PPO, {f"{SYNC}.backend": "trinity"}, f"{SYNC}.backend"),
        (PPO, {"trainer.v1.trainer_mode": "separate_async"}, f"{SYNC}.backend"),
        (
            PPO,
            {"trainer.v1.trainer_mode": "separate_async", f"{SYNC}.backend": "trinity"},
            f"{SYNC}.custom_backend_module",
        ),
    ],
)
def test_what_is_in_the_way_is_named_by_its_key(
    config: dict[str, object], changes: dict[str, object], subject: str
) -> None:
    assert [one.subject for one in found({**config, **changes}) if one.state == "stops"] == [subject]


@pytest.mark.parametrize(
    ("environment", "version", "subject"),
    [
        ({ENGINES: "trinity"}, "0.9.0", MODULES),
        ({**ON, MODULES: PLUGIN[:-1]}, "0.9.0", MODULES),
        ({**ON, ENGINES: "Trinity"}, "0.9.0", ENGINES),
        (ON, "0.10.0", "verl"),
        (ON, None, "verl"),
    ],
)
def test_a_plug_in_that_verl_does_not_ask_for_is_in_the_way(
    environment: dict[str, str], version: str | None, subject: str
) -> None:
    assert [one.subject for one in found(SFT, environment, version) if one.state == "stops"] == [subject]


@pytest.mark.parametrize(
    ("policy", "is_found"), [(None, True), ("auto", True), ("other, trinity", True), ("other", False), ("none", False)]
)
def test_an_entry_point_that_verl_loads_is_enough(policy: str | None, is_found: bool) -> None:
    environment = {ENGINES: "trinity", **({} if policy is None else {PLUGINS: policy})}
    told = list(findings(SFT.get, environment, "0.9.1", ["trinity"]))
    [one] = [one for one in told if one.subject == MODULES]
    assert (one.state, bool(one.add)) == (("ours", False) if is_found else ("stops", True))


def test_the_command_sees_the_entry_point_of_an_installed_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    about = tmp_path / "of_ours-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: of-ours\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[verl.plugins]\nmine = other\nby_name = {PLUGIN}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(MODULES, raising=False)
    monkeypatch.setenv(ENGINES, "trinity")
    monkeypatch.setenv(PLUGINS, "by_name")
    assert cli.main(["verl", "doctor", "trainer.save_freq=5"]) == 0
    assert "by its entry point by_name" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "verl"),
        ({CALLBACK_KEY: CALLBACK}, "ours"),
        ({CALLBACK_KEY: "mine.Callback"}, "verl"),
        ({CALLBACK_KEY: CALLBACK, "trainer.use_v1": False}, "verl"),
    ],
)
def test_who_is_told_of_a_save_is_said(changes: dict[str, object], state: str) -> None:
    [one] = [one for one in found({**PPO, **changes}) if one.subject == CALLBACK_KEY]
    assert one.state == state
    assert list(one.add) == ([] if changes else [f"{CALLBACK_KEY}={CALLBACK}"])


def test_the_lines_to_add_mend_it() -> None:
    [stops] = [one for one in found(SFT, {**ON, MODULES: "mine"}) if one.state == "stops"]
    assert stops.add == [f"export {MODULES}=mine,{PLUGIN}"]
    mended = dict([stops.add[0].removeprefix("export ").split("=")])
    assert not [one for one in found(SFT, {**ON, **mended}) if one.state == "stops"]


def test_what_a_resume_would_lack_is_told() -> None:
    told = found({**SFT, "checkpoint.save_contents": ["model"]})
    [one] = [one for one in told if one.subject == "checkpoint.save_contents"]
    assert one.state == "verl"
    assert one.add == ["checkpoint.save_contents=[model,optimizer,extra]"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"engine": None}, "engine"),
        ({"engine.strategy": None}, "engine.strategy"),
        ({"trainer.resume_mode": "always"}, "trainer.resume_mode"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path"),
        ({"trainer.save_freq": "often"}, "trainer.save_freq"),
        ({"checkpoint.save_contents": "model"}, "checkpoint.save_contents"),
        ({"trainer.default_local_dir": None}, "trainer.default_local_dir"),
    ],
)
def test_what_has_no_meaning_is_refused_by_its_key(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        found({**SFT, **changes})


def test_verls_own_configurations_are_composed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ON.items():
        monkeypatch.setenv(name, value)
    sft = ["--config", "sft_trainer_engine", "trainer.save_freq=5", "engine.strategy=fsdp2"]
    assert cli.main(["verl", "doctor", *sft]) == 0
    assert "ours   engine.strategy" in capsys.readouterr().out
    assert cli.main(["verl", "doctor", "algorithm.adv_estimator=gae"]) == 1
    told = capsys.readouterr().out
    assert "ours   critic.strategy" in told
    assert "stops  trainer.save_freq" in told
    assert "\n  trainer.save_freq=20\n" in told


def test_the_printed_lines_can_be_pasted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULES, "mine")
    monkeypatch.delenv(ENGINES, raising=False)
    less = ["actor_rollout_ref.actor.checkpoint.save_contents=[model]"]
    assert cli.main(["verl", "doctor", *less]) == 1
    overrides = list(less)
    for line in [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]:
        first, *rest = shlex.split(line)
        if first == "export":
            monkeypatch.setenv(*rest[0].split("="))
        else:
            overrides.append(first)
    assert cli.main(["verl", "doctor", *overrides]) == 0


def test_a_saved_file_is_read_and_what_cannot_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("engine: {strategy: '${nowhere}'}\ntrainer: {device: cpu}\n")
    assert cli.main(["verl", "doctor", "--config", str(file)]) == 2
    assert "engine.strategy" in capsys.readouterr().err
    assert cli.main(["verl", "doctor", "--config", str(file), "trainer.devise=cpu"]) == 2
    assert "trainer.devise" in capsys.readouterr().err.replace("\n", "")
    assert cli.main(["verl", "doctor", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_neither_torch_nor_ray_nor_verl_is_imported() -> None:
    code = (
        "import sys; from trinity_sync.cli.main import main; main(['verl', 'doctor']);"
        "print([name for name in ('torch', 'ray', 'verl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
