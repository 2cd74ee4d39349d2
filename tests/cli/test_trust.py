"""What the saved settings of a run may do: everything that this user recorded on this host, and little of all else."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.cli.stand_in import Computing, standing_in
from tests.model_folders import bare_model
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.config import user_record
from trinity_sync.config.saved_config import record_of
from trinity_sync.errors import ConfigError
from trinity_sync.host.hardware import own_module_folders
from trinity_sync.reproduction import outcome

Capture = pytest.CaptureFixture[str]
REWARD = "task.reward._target_=of_a_user.mine"


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    with standing_in(Computing(), tmp_path / "work", monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def reward() -> Iterator[Path]:
    """A module in the current folder, with a reward."""
    path = Path("of_a_user.py").absolute()
    path.write_text("def mine(prompt, response):\n    return 1.0\n")
    Path("prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    yield path
    forget()


def forget() -> None:
    sys.modules.pop("of_a_user", None)


def first(*overrides: str, folder: str = "run") -> Path:
    assert cli.main(["run", f"hydra.run.dir={folder}", "trainer.steps=5", *overrides]) == 0
    forget()
    return Path(folder).absolute()


def rewarded(folder: str = "run") -> Path:
    return first("task=jsonl", "task.path=prompts.jsonl", REWARD, folder=folder)


def resume(*arguments: object) -> int:
    return cli.main(["resume", *map(str, arguments)])


def record(folder: Path) -> Path:
    return folder / ".hydra" / "recorded.json"


def foreign(*overrides: str) -> Path:
    """A run of somebody else's, with these overrides."""
    folder = first()
    record(folder).unlink()
    add(folder, *overrides)
    return folder


def add(folder: Path, *overrides: str) -> None:
    saved = folder / ".hydra" / "overrides.yaml"
    OmegaConf.save([*OmegaConf.to_container(OmegaConf.load(saved), resolve=False), *overrides], saved)


def started_in(folder: Path, place: Path) -> None:
    saved = folder / ".hydra" / "hydra.yaml"
    settings = OmegaConf.load(saved)
    settings.hydra.runtime.cwd = str(place)
    OmegaConf.save(settings, saved)


# the honest case


def test_a_reward_of_the_users_own_is_trusted_without_a_flag(launcher: Computing, reward: Path) -> None:
    assert resume(rewarded()) == 0


def test_a_reward_of_the_users_own_is_found_from_another_folder(
    launcher: Computing, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewarded()
    monkeypatch.chdir(tmp_path)
    seen: list[list[str]] = []
    launcher.behave = lambda cfg: seen.append(own_module_folders()) or 0  # type: ignore[func-returns-value]
    assert resume(folder) == 0
    assert seen == [[str(reward.parent)]]


@pytest.mark.all
def test_a_reward_in_a_folder_of_the_python_path_is_found_without_it(
    launcher: Computing, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    reward.rename(tmp_path / "lib" / reward.name)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path / "lib"))
        folder = rewarded()
    assert resume(folder) == 0


def test_a_resume_that_was_allowed_is_recorded_in_turn(launcher: Computing, reward: Path) -> None:
    folder = rewarded()
    record(folder).unlink()
    given = [f"task.path={Path('prompts.jsonl').absolute()}", "--allow-target=of_a_user"]
    assert resume(folder, *given) == 0
    assert resume(folder) == 0


def test_places_and_addresses_of_the_users_own_are_used_again(launcher: Computing, tmp_path: Path) -> None:
    own = ["checkpoint.mirror=copies", f"checkpoint.dir={tmp_path}/kept", "cluster=existing", "cluster.address=auto"]
    folder = first(*own, "tracker=mlflow", "tracker.mlflow.uri=http://10.0.0.1:5000")
    assert resume(folder) == 0


def test_a_run_that_was_moved_is_trusted(launcher: Computing, reward: Path) -> None:
    folder = rewarded().rename("moved")
    assert resume(folder) == 0


def test_a_package_of_the_users_own_is_trusted_until_a_file_of_it_changes(launcher: Computing, reward: Path) -> None:
    Path("of_a_user").mkdir()
    reward.rename("of_a_user/__init__.py")
    Path("of_a_user/helper.py").write_text("")
    folder = rewarded()
    assert resume(folder) == 0
    forget()
    Path("of_a_user/helper.py").write_text("changed = 1\n")
    assert resume(folder) == 2


def test_a_reward_in_verls_form_is_trusted_until_its_file_changes(launcher: Computing) -> None:
    settings = OmegaConf.create({"task": {"reward": {"function_path": "judge.py"}}})
    Path("judge.py").write_text("first")
    folder = first()
    hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
    text = record_of([settings], hydra, config.Trust(where=folder, started_in=Path.cwd()))
    assert text is not None
    record(folder).write_text(text)
    OmegaConf.save(settings, folder / ".hydra" / "config.yaml")
    assert config.asked_again(folder, {}) == []
    Path("judge.py").write_text("second")
    assert config.asked_again(folder, {}) == ["task.reward.function_path=judge.py"]


def test_jobs_of_a_sweep_that_have_not_begun_begin_with_the_users_reward(launcher: Computing, reward: Path) -> None:
    line = ["task=jsonl", "task.path=prompts.jsonl", REWARD, "seed=1,2", "hydra.sweep.dir=sweep", "trainer.steps=5"]
    assert cli.main(["run", "-m", *line]) == 0
    shutil.rmtree("sweep/1")
    forget()
    assert resume("sweep") == 0
    assert len(launcher.calls) == 3


def test_jobs_of_somebody_elses_sweep_are_data(launcher: Computing, reward: Path, capsys: Capture) -> None:
    line = ["task=jsonl", "task.path=prompts.jsonl", REWARD, "seed=1,2", "hydra.sweep.dir=sweep", "trainer.steps=5"]
    assert cli.main(["run", "-m", *line]) == 0
    shutil.rmtree("sweep/1")
    Path("sweep/.recorded.json").unlink()
    forget()
    assert resume("sweep") == 1
    assert "job 1: task.reward._target_ is of_a_user.mine" in capsys.readouterr().err


def options(*lines: str) -> str:
    """An experiment of the user's own, as arguments."""
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text("\n".join(["# @package _global_", *lines]))
    return f"--config-dir={Path('conf').absolute()}"


@pytest.mark.all
def test_jobs_of_a_sweep_begin_with_all_that_an_option_file_of_the_users_own_names(
    launcher: Computing, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ["task:", f"  path: {Path('prompts.jsonl').absolute()}", "  reward:", "    _target_: of_a_user.mine"]
    places = ["checkpoint:", f"  mirror: {tmp_path}/copies/${{hydra:job.num}}", "model:", "  trust_remote_code: true"]
    own = options("defaults:", "  - override /task: jsonl", *task, *places)
    line = [own, "experiment=mine", "seed=1,2", "hydra.sweep.dir=sweep", "trainer.steps=5"]
    mirrors: list[str] = []
    launcher.behave = lambda cfg: mirrors.append(cfg.checkpoint.mirror) or 0  # type: ignore[func-returns-value]
    assert cli.main(["run", "-m", *line]) == 0
    sweep = Path("sweep").absolute()
    shutil.rmtree("sweep/1")
    forget()
    monkeypatch.chdir(tmp_path)
    assert resume(sweep) == 0
    assert mirrors == [f"{tmp_path}/copies/{number}" for number in (0, 1, 1)]


@pytest.mark.parametrize(
    ("key", "model", "later", "code"),
    [
        ("model.path", "mine", "mine", 0),
        ("model.path", "sweep/mine", "sweep/mine", 1),
        ("model.path", "mine", "sweep/theirs", 1),
        ("algorithm.kl.reference", "mine", "sweep/theirs", 1),
    ],
)
@pytest.mark.few(1)
def test_the_record_of_a_sweep_covers_no_code_of_a_model_in_its_folder(
    launcher: Computing, capsys: Capture, key: str, model: str, later: str, code: int
) -> None:
    then, now = (f"{key}={bare_model(Path(name)).absolute()}" for name in (model, later))
    own = ["model.trust_remote_code=true", "algorithm=grpo", "algorithm.kl.coeff=0.1", then]
    assert cli.main(["run", "-m", "seed=1,2", "hydra.sweep.dir=sweep", "trainer.steps=5", *own]) == 0
    shutil.rmtree("sweep/1")
    saved = Path("sweep/multirun.yaml")
    saved.write_text(saved.read_text().replace(then, now))
    assert resume("sweep") == code
    assert ("job 1: model.trust_remote_code is true" in capsys.readouterr().err) == bool(code)


@pytest.mark.all
def test_the_record_of_a_sweep_covers_code_of_the_models_alone_that_were_named_with_it(
    launcher: Computing, capsys: Capture
) -> None:
    mine, theirs = (f"model.path={bare_model(Path(name)).absolute()}" for name in ("mine", "theirs"))
    own = options("model:", "  trust_remote_code: true", f"  path: {mine.removeprefix('model.path=')}")
    Path("conf/experiment/other.yaml").write_text(f"# @package _global_\nmodel:\n  path: {theirs[11:]}\n")
    line = [own, "experiment=mine,other", "hydra.sweep.dir=sweep", "trainer.steps=5"]
    assert cli.main(["run", "-m", *line]) == 0
    shutil.rmtree("sweep/0")
    saved = OmegaConf.load("sweep/multirun.yaml")
    saved.hydra.overrides.task.append(theirs)
    OmegaConf.save(saved, "sweep/multirun.yaml")
    assert resume("sweep") == 1
    assert "job 0: model.trust_remote_code is true" in capsys.readouterr().err


def test_the_record_of_a_sweep_does_not_cover_where_hydra_looks_for_options(
    launcher: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib" / "evil").mkdir(parents=True)
    (tmp_path / "lib" / "evil" / "__init__.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    assert cli.main(["run", "-m", "seed=1,2", "hydra.sweep.dir=sweep", "trainer.steps=5"]) == 0
    shutil.rmtree("sweep/1")
    saved = OmegaConf.load("sweep/multirun.yaml")
    saved.hydra.overrides.hydra.append("hydra.searchpath=[pkg://evil]")
    OmegaConf.save(saved, "sweep/multirun.yaml")
    assert resume("sweep") == 1
    assert len(launcher.calls) == 2


def test_a_key_that_cannot_be_read_now_leaves_the_record(launcher: Computing, reward: Path, tmp_path: Path) -> None:
    folder = rewarded()
    (tmp_path / "state").rename(tmp_path / "away")
    (tmp_path / "state").touch()
    assert resume(folder, f"task.path={Path('prompts.jsonl').absolute()}", "--allow-target=of_a_user") == 0
    (tmp_path / "state").unlink()
    (tmp_path / "away").rename(tmp_path / "state")
    forget()
    assert resume(folder) == 0


def test_a_run_of_the_users_own_is_reproduced_without_a_flag_from_anywhere(
    launcher: Computing, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewarded()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", str(folder)]) == 0


def test_a_copy_of_the_users_own_is_trusted_but_for_the_places_that_its_original_writes(
    launcher: Computing, reward: Path, capsys: Capture
) -> None:
    shutil.copytree(rewarded(), "copied")
    assert resume("copied") == 0
    shutil.copytree(first("checkpoint.mirror=copies", folder="mirrored"), "copied too")
    assert resume("copied too") == 2
    assert "checkpoint.mirror is" in capsys.readouterr().err


# where the record does not count


def test_a_reward_that_was_edited_since_is_refused_and_said_to_be(
    launcher: Computing, reward: Path, capsys: Capture
) -> None:
    folder = rewarded()
    reward.write_text("def mine(prompt, response):\n    return 2.0\n")
    assert resume(folder) == 2
    said = capsys.readouterr().err
    assert "its code has changed since the run recorded it" in said
    assert "add --allow-target of_a_user" in said
    assert resume(folder, "--allow-target=of_a_user") == 0


def test_another_module_of_that_name_that_is_found_first_is_refused(
    launcher: Computing, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewarded()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / reward.name).write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert resume(folder) == 2


def test_places_in_the_record_of_another_run_do_not_count(launcher: Computing) -> None:
    own = first("checkpoint.mirror=copies", folder="own")
    folder = foreign("checkpoint.mirror=copies")
    shutil.copy(record(own), record(folder))
    assert resume(folder) == 2


def test_a_place_that_run_json_names_is_a_saved_one(launcher: Computing, capsys: Capture) -> None:
    folder = first()
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"places": {"checkpoint.mirror": "/theirs"}}))
    assert resume(folder) == 2
    assert "checkpoint.mirror is /theirs" in capsys.readouterr().err


def test_a_value_that_was_edited_is_refused_beside_those_that_were_not(launcher: Computing, capsys: Capture) -> None:
    folder = first("checkpoint.mirror=copies", "cluster=existing", "cluster.address=auto")
    add(folder, "cluster.address=10.6.6.6:6379")
    assert resume(folder) == 2
    said = capsys.readouterr().err
    assert "cluster.address is 10.6.6.6:6379 in the saved settings" in said
    assert "checkpoint.mirror" not in said


def test_a_relative_place_means_the_folder_in_which_it_was_recorded(launcher: Computing, tmp_path: Path) -> None:
    folder = first("checkpoint.mirror=copies")
    started_in(folder, tmp_path)
    assert resume(folder) == 2


def test_a_place_that_refers_to_an_edited_setting_is_refused(launcher: Computing, capsys: Capture) -> None:
    folder = first("checkpoint.mirror=/copies/${name}")
    assert resume(folder) == 0
    add(folder, "name=evil")
    assert resume(folder) == 2
    assert "checkpoint.mirror is /copies/${name}" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["another host", "readable key", "no key", "group may write the folder", "link"])
@pytest.mark.few(2)
def test_without_a_key_of_ones_own_everything_saved_is_data(
    launcher: Computing, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = rewarded()
    key = tmp_path / "state" / "trinity-sync" / f"{socket.gethostname()}.key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    if how == "another host":
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
    elif how == "readable key":
        key.chmod(0o640)
    elif how == "no key":
        key.unlink()
    elif how == "link":
        key.symlink_to(key.rename(tmp_path / "elsewhere"))
    else:
        key.parent.chmod(0o770)
    assert resume(folder) == 2


def test_a_state_folder_of_another_user_is_not_used(
    launcher: Computing, reward: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not record(rewarded()).exists()


@pytest.mark.parametrize("state", ["relative", "/proc/none"])
def test_a_run_whose_user_has_no_place_for_a_key_records_nothing_and_goes_on(
    launcher: Computing, reward: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", state)
    folder = rewarded()
    assert not record(folder).exists()
    assert resume(folder) == 2


def test_a_run_that_began_and_was_refused_keeps_its_record(launcher: Computing) -> None:
    def refuse(cfg: object) -> int:
        raise ConfigError("nobody answers at cluster.address")

    launcher.behave = refuse
    cli.main(["run", "hydra.run.dir=run"])
    assert record(Path("run")).exists()


def test_a_key_needs_no_hard_links(launcher: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    assert record(first()).exists()


def test_an_interrupt_leaves_no_empty_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        user_record.record([], {})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("text", ["", "[]", '{"signatures": 3}', '{"signatures": [], "modules": []}', "[" * 9999])
@pytest.mark.few(2)
def test_a_record_that_cannot_be_read_counts_as_none(launcher: Computing, reward: Path, text: str) -> None:
    folder = rewarded()
    record(folder).write_text(text)
    assert resume(folder) == 2


# someone else's folder


def test_the_saved_working_directory_is_not_on_the_path(launcher: Computing, tmp_path: Path) -> None:
    folder = foreign()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "habana_frameworks.py").write_text("raise SystemExit('it ran')\n")
    started_in(folder, tmp_path / "theirs")
    paths: list[list[str]] = []
    launcher.behave = lambda cfg: paths.append([*sys.path, *own_module_folders()]) or 0  # type: ignore[func-returns-value]
    assert resume(folder) == 0
    assert str(tmp_path / "theirs") not in paths[0]


def test_nor_is_the_current_one_which_may_be_the_saved_folder(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign()
    monkeypatch.chdir(folder)
    paths: list[list[str]] = []
    launcher.behave = lambda cfg: paths.append([*sys.path, *own_module_folders()]) or 0  # type: ignore[func-returns-value]
    assert resume(".") == 0
    assert str(folder) not in paths[0]


ENGINE = [
    "worker_extension_cls=evil.Ext",
    "worker_cls=evil.Worker",
    "scheduler_cls=evil.Scheduler",
    "kv_transfer_config={kv_connector: X, kv_connector_module_path: evil}",
    "compilation_config={backend: evil.compile}",
    "no_such_key=1",
    "gpu_memory_utilization=evil",
    "hf_token=x",
    "additional_config.deep=[{deeper: true}]",
]


@pytest.mark.parametrize("setting", ENGINE)
@pytest.mark.few(3)
def test_what_may_have_vllm_run_code_is_refused(launcher: Computing, setting: str, capsys: Capture) -> None:
    assert resume(foreign("explorer=vllm", f"+explorer.engine.{setting}")) == 2
    said = capsys.readouterr().err
    assert f"explorer.engine.{setting.partition('=')[0]}" in said
    assert "in the saved settings" in said


@pytest.mark.parametrize("setting", ENGINE)
@pytest.mark.few(2)
def test_and_so_it_is_in_a_bundle(launcher: Computing, setting: str, capsys: Capture) -> None:
    bundle = bundled(f"+explorer.engine.{setting}", "explorer=vllm")
    assert cli.main(["reproduce", str(bundle)]) == 2
    assert f"in the saved settings of {bundle}" in capsys.readouterr().err


def bundled(*overrides: str) -> Path:
    """A bundle of somebody else's, with these overrides."""
    folder = foreign()
    assert cli.main(["reproduce", str(folder), "--bundle", "--output=a.json"]) == 0
    content = json.loads(Path("a.json").read_bytes())
    content["overrides"] += overrides
    content["config"] = config.plain(config.compose(content["overrides"]))
    content["run"]["config_digest"] = None
    del content["self"]
    content["self"] = outcome._digest(content)
    Path("a.json").write_text(json.dumps(content))
    return Path("a.json").absolute()


def test_what_is_known_to_be_harmless_to_an_engine_is_taken(launcher: Computing) -> None:
    override = "backend.overrides={forward_prefetch: true, wrap_policy: {min_num_params: 10}}"
    assert resume(foreign(override)) == 0


@pytest.mark.parametrize(
    "setting",
    [
        "use_dist_checkpointing=true",
        "qat={quantization_config_path: /x}",
        "router_replay={replay_file: /x}",
        "override_transformer_config={fp8_quantizer_factory: os.system}",
        "forward_prefetch=yes_please",
    ],
)
@pytest.mark.few(2)
def test_other_overrides_of_a_backend_are_refused(launcher: Computing, setting: str, capsys: Capture) -> None:
    assert resume(foreign("backend=megatron", f"+backend.overrides.{setting}")) == 2
    assert "which may have the engine run code" in capsys.readouterr().err


@pytest.mark.parametrize(
    "named",
    [
        "{_target_:trinity_sync.tasks.verl._loaded,path:evil.py,name:f,_partial_:false}",
        "{_target_:trinity_sync.tasks.verl.VerlReward,_args_:[evil.py,f]}",
        "{_target_:trinity_sync.tasks.reward_processes._loaded,pickled:evil.py}",
        "{_target_:trinity_sync.tracking.wandb.WandbTracker,project:evil}",
    ],
)
@pytest.mark.few(1)
def test_no_other_function_of_ours_may_be_named(launcher: Computing, reward: Path, named: str, capsys: Capture) -> None:
    Path("evil.py").write_text("open('ran', 'w').close()\n\ndef f(*args, **kwargs):\n    return 1.0\n")
    given = ["task=jsonl", f"task.path={Path('prompts.jsonl').absolute()}", f"+task.reward.x={named}"]
    place = given[1]
    assert resume(foreign(*given), place) == 2
    assert "task.reward.x._target_ is trinity_sync." in capsys.readouterr().err
    assert cli.main(["reproduce", str(bundled(*given))]) == 2
    assert not Path("ran").exists()


def test_a_function_of_a_trusted_file_is_asked_for_by_name(launcher: Computing, capsys: Capture) -> None:
    folder = foreign("+task.reward.function_name=another")
    assert resume(folder) == 2
    assert "add task.reward.function_name=another" in capsys.readouterr().err


PLACES = [
    (["cluster=existing", "cluster.address=10.6.6.6:6379"], "cluster.address=10.6.6.6:6379"),
    (["cluster.temp_dir=/elsewhere"], "cluster.temp_dir=/elsewhere"),
    (["checkpoint.mirror=s3://theirs/run"], "checkpoint.mirror=s3://theirs/run"),
    (["checkpoint.mirror=relative"], "checkpoint.mirror=relative"),
    (["+checkpoint.mirror_options.anon=false"], "checkpoint.mirror_options.anon=false"),
    (["checkpoint.dir=/elsewhere"], "checkpoint.dir=/elsewhere"),
    (["checkpoint.resume_from=/elsewhere/global_step_1"], "checkpoint.resume_from=/elsewhere/global_step_1"),
    (["sync.shm_dir=/elsewhere"], "sync.shm_dir=/elsewhere"),
    (["explorer=vllm_server", "explorer.url=http://10.6.6.6"], "explorer.url=http://10.6.6.6"),
    (["explorer=vllm_server", "explorer.url=[http://10.6.6.6]"], "explorer.url.0=http://10.6.6.6"),
    (["explorer=vllm_server", "explorer.key_env=AWS_SECRET_ACCESS_KEY"], "explorer.key_env=AWS_SECRET_ACCESS_KEY"),
    (["tracker=mlflow", "tracker.mlflow.uri=http://10.6.6.6"], "tracker.mlflow.uri=http://10.6.6.6"),
    (["tracker=wandb", "tracker.wandb.mode=offline", "tracker.wandb.entity=theirs"], "tracker.wandb.entity=theirs"),
    (["tracker=wandb"], "tracker.wandb.mode=online"),
    (["tracker=trackio", "tracker.trackio.space=their/space"], "tracker.trackio.space=their/space"),
    (["model=path", "model.path=their/model"], "model.path=their/model"),
    (["+task.reward.helper=https://theirs"], "task.reward.helper=https://theirs"),
    (["+theirs={mirror: /x}", "checkpoint.mirror_options=${theirs}"], "checkpoint.mirror_options.mirror=/x"),
]


@pytest.mark.parametrize(("overrides", "asked"), PLACES, ids=[asked for _, asked in PLACES])
@pytest.mark.few(4)
def test_a_place_outside_the_folder_is_asked_for_by_name(
    launcher: Computing, overrides: list[str], asked: str, capsys: Capture
) -> None:
    folder = foreign(*overrides)
    assert resume(folder) == 2
    said = capsys.readouterr().err
    key, _, value = asked.partition("=")
    assert f"{key} is " in said
    assert value in said


def test_a_place_that_is_given_again_is_used(launcher: Computing) -> None:
    folder = foreign("checkpoint.mirror=/theirs/run", "tracker=mlflow", "cluster=existing", "cluster.address=auto")
    add(folder, "tracker.mlflow.uri=http://theirs")
    given = ["checkpoint.mirror=/theirs/run", "tracker.mlflow.uri=http://theirs", "cluster.address=auto"]
    assert resume(folder, *given) == 0
    assert resume(folder) == 0


@pytest.mark.parametrize("given", ["checkpoint={interval: 5}", "checkpoint=default"])
@pytest.mark.few(1)
def test_a_setting_beside_a_place_does_not_vouch_for_it(launcher: Computing, given: str) -> None:
    folder = foreign("checkpoint.dir=/theirs", "checkpoint.mirror=/theirs/copies")
    path = folder / "run.json"
    nowhere = {"checkpoint.dir": None, "checkpoint.mirror": None}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"places": nowhere}))
    assert resume(folder, given) == 2
    OmegaConf.save(config.compose(["checkpoint.dir=/theirs", "checkpoint.mirror=/x"]), folder / ".hydra/config.yaml")
    assert resume(folder, given) == 0
    used = launcher.calls[-1].cfg.checkpoint
    assert (used.dir, used.mirror) == (None, None)


def test_nor_does_it_for_a_link(launcher: Computing, tmp_path: Path) -> None:
    folder = foreign()
    (folder / "checkpoints").symlink_to(tmp_path / "theirs")
    assert resume(folder, "checkpoint=default") == 2


def test_a_place_that_run_json_names_is_no_change(launcher: Computing, capsys: Capture) -> None:
    folder = first("checkpoint.mirror=/copies")
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"places": {"checkpoint.mirror": None}}))
    assert resume(folder) == 0
    assert "changed" not in capsys.readouterr().err


def test_the_users_module_comes_before_one_of_that_name_in_the_saved_folder(
    launcher: Computing, reward: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = foreign("task=jsonl", REWARD)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / reward.name).write_text("raise SystemExit('it ran')\n")
    started_in(folder, tmp_path / "theirs")
    assert resume(folder, f"task.path={Path('prompts.jsonl').absolute()}", REWARD) == 0
    assert f"note: of_a_user is imported from {reward.parent}" in capsys.readouterr().err


def test_places_inside_the_folder_are_used(launcher: Computing) -> None:
    folder = foreign()
    add(folder, f"checkpoint.dir={folder}/kept", f"checkpoint.mirror={folder}/copies")
    assert resume(folder) == 0


@pytest.mark.parametrize("name", ["checkpoints", "logs", "events.jsonl", ".hydra/config.yaml", "checkpoints/.staging"])
@pytest.mark.few(2)
def test_a_link_that_leads_out_of_the_folder_is_refused(
    launcher: Computing, tmp_path: Path, name: str, capsys: Capture
) -> None:
    folder = foreign()
    link = folder / name
    if link.exists():
        link.rename(tmp_path / "theirs")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "theirs")
    assert resume(folder) == 2
    assert f"is {tmp_path}/theirs in the saved settings" in capsys.readouterr().err


def test_checkpoints_behind_a_link_are_asked_for_by_name(launcher: Computing, tmp_path: Path) -> None:
    folder = foreign()
    (folder / "checkpoints").symlink_to(tmp_path / "large")
    assert resume(folder, f"checkpoint.dir={tmp_path}/large") == 0
    assert resume(folder) == 0


@pytest.mark.parametrize("name", ["global_step_1", ".trash-global_step_1-0a"])
@pytest.mark.few(1)
def test_a_step_that_was_archived_and_linked_back_is_in_no_resumes_way(
    launcher: Computing, tmp_path: Path, name: str
) -> None:
    folder = foreign()
    (tmp_path / "archive" / "global_step_1").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / name).symlink_to(tmp_path / "archive" / "global_step_1")
    assert resume(folder) == 0


@pytest.mark.parametrize("override", ["name=${oc.env:A_SECRET}", "trainer.lr=${oc.env:A_SECRET}"])
def test_the_environment_is_not_read_for_somebody_else(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch, capsys: Capture, override: str
) -> None:
    monkeypatch.setenv("A_SECRET", "0.125")
    folder = foreign(override)
    for command in ("resume", "reproduce"):
        assert cli.main([command, str(folder)]) == 2
        said = capsys.readouterr().err
        assert "which reads your environment" in said
        assert "0.125" not in said
    assert len(launcher.calls) == 1


@pytest.mark.parametrize("what", [["--bundle", "--output=b.json"], []])
def test_nor_is_it_for_the_settings_that_a_repetition_compares_with(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch, capsys: Capture, what: list[str]
) -> None:
    monkeypatch.setenv("A_SECRET", "secret-value")
    folder = foreign()
    saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
    saved.name = "${oc.env:A_SECRET}"
    OmegaConf.save(saved, folder / ".hydra" / "config.yaml")
    assert cli.main(["reproduce", str(folder), *what]) == 2
    assert "name is ${oc.env:A_SECRET}" in capsys.readouterr().err


def test_a_place_that_a_repetition_leaves_out_need_not_be_known(launcher: Computing) -> None:
    folder = foreign()
    saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
    saved.checkpoint.mirror = "${oc.env:NO_SUCH_VARIABLE}"
    OmegaConf.save(saved, folder / ".hydra" / "config.yaml")
    assert cli.main(["reproduce", str(folder)]) == 0


def test_all_that_is_asked_for_is_said_at_once(launcher: Computing, reward: Path, capsys: Capture) -> None:
    folder = foreign("task=jsonl", "task.path=prompts.jsonl", REWARD, "checkpoint.mirror=a b")
    assert resume(folder) == 2
    said = capsys.readouterr().err
    for text in ("--allow-target of_a_user", f"task.path={Path('prompts.jsonl').absolute()}", "checkpoint.mirror="):
        assert text in said


def test_the_name_of_a_model_is_asked_for_as_it_is(launcher: Computing, capsys: Capture) -> None:
    assert resume(foreign("model=path", "model.path=their/model")) == 2
    assert "add model.path=their/model\n" in capsys.readouterr().err


def test_a_secret_is_asked_for_by_a_reference(launcher: Computing, capsys: Capture) -> None:
    assert resume(foreign("+checkpoint.mirror_options.secret=abc123xyz")) == 2
    assert "add 'checkpoint.mirror_options.secret=${oc.env:NAME}'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_now_is_said_to_be(
    launcher: Computing, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder, real = first(), Path.iterdir

    def refused(path: Path) -> Iterator[Path]:
        if path == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert resume(folder) == 2
    assert f"{folder} cannot be read: Permission denied" in capsys.readouterr().err


def test_settings_without_an_end_are_refused(launcher: Computing, capsys: Capture) -> None:
    assert resume(foreign("+a={b: '${c}'}", "+c={d: '${a}'}")) == 2
    assert "levels deep" in capsys.readouterr().err


# the command that is printed


def test_the_command_to_go_on_with_needs_nothing_of_ones_own_run(launcher: Computing, reward: Path) -> None:
    assert config.asked_again(rewarded(), {}) == []


def test_the_command_to_go_on_with_has_only_what_can_be_typed(launcher: Computing, tmp_path: Path) -> None:
    folder = first()
    (folder / "notes").symlink_to(tmp_path)
    assert config.asked_again(folder, {}) == []


def test_the_command_to_go_on_with_has_what_a_resume_asks_for(
    launcher: Computing, reward: Path, capsys: Capture
) -> None:
    folder = first("task=jsonl", "task.path=prompts.jsonl", REWARD, "model.trust_remote_code=true")
    record(folder).unlink()
    asked = config.asked_again(folder, {})
    path = Path("prompts.jsonl").absolute()
    assert sorted(asked) == ["--allow-target of_a_user", "model.trust_remote_code=true", f"task.path={path}"]
    assert resume(folder, *shlex.split(" ".join(asked))) == 0
