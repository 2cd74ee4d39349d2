"""Compositions come out as those of Hydra left to itself, and do not do the same work again."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import version
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, ValidationError, _utils, base, open_dict
from omegaconf.basecontainer import BaseContainer

import launch
from tests.quick_hydra import make_quick
from trinity_sync import config
from trinity_sync.launch import app

CHOICES = (
    (),
    ("sync=nccl", "backend=megatron", "model.architecture.hidden_size=32"),
    ("experiment=quick", "retention=[keep_last,keep_best]", "+backend.overrides.some.key=1"),
    ("tracker=[tensorboard,wandb]", "hydra/launcher=basic", "task=jsonl", "task.path=rows.jsonl"),
)


@pytest.fixture(autouse=True, scope="module")
def _quick() -> None:
    make_quick()


@pytest.mark.parametrize(("package", "other"), [("hydra", "1.3.9"), ("omegaconf", "2.4.0")])
def test_who_uses_the_library_or_has_other_versions_keeps_hydra_as_it_is(package: str, other: str) -> None:
    program = f"""
import {package}
import launch
from tests.quick_hydra import make_quick
from trinity_sync import config
from trinity_sync.launch import app
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import _utils
config.compose(["sync=nccl"])
assert not hasattr(_utils.get_yaml_loader, "__wrapped__")
{package}.__version__ = "{other}"
make_quick()
assert not hasattr(_utils.get_yaml_loader, "__wrapped__") and "__deepcopy__" not in vars(ConfigStore)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def own_pace(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hydra and OmegaConf as they are without this program."""
    for module, name in (
        (version, "_get_version"),
        (defaults_list, "_create_interpolation_map"),
        (_utils, "get_yaml_loader"),
        (_utils, "parse"),
        (base, "parse"),
        (ConfigStore, "load"),
        (ConfigRepository, "load_config"),
        (config_loader_impl, "create_defaults_list"),
        (ConfigLoaderImpl, "_compose_config_from_defaults_list"),
        (DictConfig, "__deepcopy__"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    monkeypatch.setattr(BaseContainer, "_to_content", staticmethod(BaseContainer._to_content.__wrapped__))
    monkeypatch.delattr(ConfigStore, "__deepcopy__")
    monkeypatch.delattr(base.Metadata, "__deepcopy__")
    return monkeypatch


def told(overrides: Sequence[str], folder: Path | None = None) -> str:
    return OmegaConf.to_yaml(config.compose(overrides, config_dir=folder, hydra=True))


@pytest.fixture
def options(tmp_path: Path) -> Path:
    """Option files, one of which is chosen by the choice of another."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "of").mkdir()
    text = "# @package _global_\ndefaults:\n  - /of: ${experiment}\n  - override /sync: nccl\n  - _self_\nseed: 7\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    (tmp_path / "of" / "mine.yaml").write_text("# @package _global_\nname: of-mine\n")
    return tmp_path


@pytest.mark.parametrize("overrides", CHOICES)
def test_what_is_composed_is_what_hydra_composes(overrides: Sequence[str], request: pytest.FixtureRequest) -> None:
    config.compose(overrides)  # so that the next one goes by what is remembered
    quick = told(overrides)
    request.getfixturevalue("own_pace")
    assert quick == told(overrides)


def test_an_option_may_be_chosen_by_another_one(options: Path) -> None:
    cfg = config.compose(["experiment=mine"], config_dir=options)
    assert (cfg.name, cfg.seed, cfg.sync.mode) == ("of-mine", 7, "nccl")


def test_a_choice_by_what_is_nowhere_is_refused_as_hydra_refuses_it(options: Path) -> None:
    file = options / "experiment" / "mine.yaml"
    file.write_text(file.read_text().replace("${experiment}", "${nothing}"))
    with pytest.raises(HydraException, match="possible interpolation keys: experiment"):
        config.compose(["experiment=mine"], config_dir=options)


def test_a_file_that_was_changed_is_read_anew(options: Path) -> None:
    assert config.compose(["experiment=mine"], config_dir=options).seed == 7
    file = options / "experiment" / "mine.yaml"
    file.write_text(file.read_text().replace("seed: 7", "seed: 8"))
    assert config.compose(["experiment=mine"], config_dir=options).seed == 8


def test_a_change_of_what_was_composed_is_not_in_the_next_one(options: Path) -> None:
    cfg = config.compose(["retention=[keep_last]"], hydra=True)
    before = OmegaConf.to_yaml(cfg)
    cfg.trainer.betas.append(0.5)
    cfg.retention.policies.keep_last.n = 77
    cfg.hydra.job.env_copy.append("HOME")
    assert told(["retention=[keep_last]"]) == before


def test_a_copy_has_flags_and_drawn_values_of_its_own() -> None:
    numbers = itertools.count()
    OmegaConf.register_new_resolver("drawn", lambda: next(numbers), use_cache=True, replace=True)
    cfg = OmegaConf.create({"a": "${drawn:}"})
    before = copy.deepcopy(cfg)
    assert (cfg.a, before.a, copy.deepcopy(cfg).a) == (0, 1, 0)
    OmegaConf.set_readonly(before, True)
    assert not OmegaConf.is_readonly(cfg)


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_what_is_read_of_a_file_may_be_changed(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "saved.yaml"
    file.write_text("a: [1, {b: 2}]\n")
    for _ in range(2):
        with file.open(mode) as stream:
            found: Any = OmegaConf.load(stream)
        assert found == {"a": [1, {"b": 2}]}
        found.a[1].b = 3
        found.a.append(4)


def test_a_file_that_cannot_be_parsed_is_named_each_time(tmp_path: Path) -> None:
    for name in ("one.yaml", "two.yaml", "one.yaml"):
        (tmp_path / name).write_text("a: 1\nb: [1\n")
        with pytest.raises(yaml.YAMLError, match=f'in "{tmp_path}/{name}", line 2'):
            OmegaConf.load(tmp_path / name)


def test_a_composition_parses_no_file_again_and_copies_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    config.compose(["sync=nccl"])
    monkeypatch.delattr(yaml.constructor.BaseConstructor, "get_single_data")
    config.compose(["sync=nccl"])
    assert copy.deepcopy(ConfigStore.instance()) is ConfigStore.instance()


def test_the_same_files_are_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config.compose(["sync=nccl"])
    monkeypatch.delattr(ConfigLoaderImpl, "_load_single_config")
    assert config.compose(["sync=nccl", "seed=3"]).seed == 3


def test_files_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config.compose(["sync=nccl", "+trainer={}"])
    monkeypatch.delattr(defaults_list, "_create_defaults_tree")
    cfg = config.compose(["seed=3", "sync=nccl", "+trainer={lr: 0.5}"], hydra=True)
    assert (cfg.seed, cfg.trainer.lr, cfg.hydra.runtime.choices.sync) == (3, 0.5, "nccl")


def test_a_start_of_a_program_chooses_and_merges_nothing_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run_main(launch.main, ["--cfg=job", "seed=2"]) == 0
    capsys.readouterr()
    monkeypatch.delattr(defaults_list, "_create_defaults_tree")
    monkeypatch.delattr(ConfigLoaderImpl, "_load_single_config")
    assert app.run_main(launch.main, ["--cfg=job", "seed=3"]) == 0
    assert "seed: 3\n" in capsys.readouterr().out


def test_an_option_that_is_gone_is_refused(options: Path) -> None:
    assert config.compose(["experiment=mine"], config_dir=options).seed == 7
    (options / "experiment" / "mine.yaml").unlink()
    with pytest.raises(HydraException, match="experiment/mine"):
        config.compose(["experiment=mine"], config_dir=options)


def test_an_option_that_is_chosen_by_a_variable_is_chosen_anew(options: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = options / "experiment" / "mine.yaml"
    file.write_text(file.read_text().replace("${experiment}", "${oc.env:TRINITY_TEST_CHOICE}"))
    (options / "of" / "other.yaml").write_text("# @package _global_\nname: of-other\n")
    for choice in ("mine", "other"):
        monkeypatch.setenv("TRINITY_TEST_CHOICE", choice)
        assert config.compose(["experiment=mine"], config_dir=options).name == f"of-{choice}"


def test_the_same_files_in_another_order_are_merged_anew(tmp_path: Path) -> None:
    for group, seed in (("first", 1), ("second", 2)):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(f"# @package _global_\nseed: {seed}\n")
    for order, seed in ((["+first=mine", "+second=mine"], 2), (["+second=mine", "+first=mine"], 1)):
        assert config.compose(order, config_dir=tmp_path).seed == seed


def test_the_same_file_at_another_place_is_merged_anew(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("x: 1\n")
    for place, added in (("overrides", {"x": 1}), ("overrides.some", {"some": {"x": 1}})):
        assert config.compose([f"+own@backend.{place}=mine"], config_dir=tmp_path).backend.overrides == added


@pytest.mark.filterwarnings("ignore:(?s).*is validated against ConfigStore schema")
def test_a_file_whose_schema_was_replaced_is_merged_anew(options: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group: dict[str, ConfigNode] = {}
    monkeypatch.setitem(ConfigStore.instance().repo, "of", group)
    for value in (1, 2):
        node = OmegaConf.create({"seed": value})
        group["mine.yaml"] = ConfigNode(name="mine.yaml", node=node, group="of", package=None, provider=None)
        assert config.compose(["+of=mine"], config_dir=options).seed == value


def test_a_file_of_the_same_text_in_another_folder_may_choose_another_one(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name / "experiment").mkdir(parents=True)
        (tmp_path / name / "of").mkdir()
        (tmp_path / name / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [/of: own]\n")
        (tmp_path / name / "of" / "own.yaml").write_text(f"# @package _global_\nseed: {seed}\n")
        assert config.compose(["experiment=mine"], config_dir=tmp_path / name).seed == seed


def test_a_node_of_the_store_that_was_replaced_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    config.compose()
    nodes = ConfigStore.instance().repo["schema"]
    other = copy.deepcopy(nodes["root.yaml"])
    with open_dict(other.node):
        other.node.added = "by a test"
    monkeypatch.setitem(nodes, "root.yaml", other)
    assert config.compose().added == "by a test"


def test_choices_are_put_together_only_where_defaults_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    create = defaults_list._create_interpolation_map
    maps: list[object] = []
    monkeypatch.setattr(defaults_list, "_create_interpolation_map", lambda *of: maps.append(create(*of)))
    config.compose(["sync=nccl", "tracker=tensorboard", "backend=megatron"])
    assert len(maps) > 20
    assert set(maps) == {None}


@pytest.mark.parametrize("resolve", [False, True])
@pytest.mark.parametrize("overrides", CHOICES)
def test_the_values_of_a_composition_and_of_its_copy_are_those_of_omegaconf(
    overrides: Sequence[str], resolve: bool, request: pytest.FixtureRequest
) -> None:
    cfg = config.compose(overrides)
    cfg.model.path, cfg.trainer.betas = None, OmegaConf.create([0.5, "${trainer.lr}"])
    quick = [OmegaConf.to_container(one, resolve=resolve) for one in (cfg, copy.deepcopy(cfg), cfg.trainer, cfg.sync)]
    request.getfixturevalue("own_pace")
    assert quick == [
        OmegaConf.to_container(one, resolve=resolve) for one in (cfg, copy.deepcopy(cfg), cfg.trainer, cfg.sync)
    ]
    assert isinstance(quick[0], dict)
    assert quick[0]["trainer"]["betas"][1] == (cfg.trainer.lr if resolve else "${trainer.lr}")


def test_values_of_a_copy_keep_their_types_and_know_their_place() -> None:
    made = copy.deepcopy(config.compose())
    with pytest.raises(ValidationError):
        made.trainer.steps = "many"
    made.sync.interval = 3
    assert made.trainer._get_node("steps")._get_full_key(None) == "trainer.steps"
    assert config.compose().sync.interval == 1
