"""The option files under conf/: each composes, is typed, is explained, and holds a default exactly once."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import MISSING, DictConfig, OmegaConf

from tests.model_folders import bare_model
from trinity_sync import config
from trinity_sync.config import composition

CONF = config.conf_dir()
GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name not in ("base", "hydra", "__pycache__"))
OPTIONS = [f"{group}={option.stem}" for group in GROUPS for option in sorted((CONF / group).glob("*.yaml"))]
NEEDS = {"learning_rate": "optuna"}
"""What an experiment needs of the extra `launchers`, which is in `dev`."""
FILES = sorted(CONF.rglob("*.yaml"))
LISTS = ("retention", "tracker")


def override(option: str) -> str:
    group, _, name = option.partition("=")
    return f"{group}=[{name}]" if group in LISTS else option


def need(option: str) -> None:
    if option in NEEDS:
        pytest.importorskip(NEEDS[option])


def short(path: Path) -> str:
    return str(path.relative_to(CONF))


def explained_keys(node: yaml.MappingNode, top: bool = True) -> Iterator[yaml.ScalarNode]:
    """The keys that hold a value; headings of nested keys explain themselves through what is below them."""
    for key, value in node.value:
        if top and key.value == "defaults":
            continue
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from explained_keys(value, top=False)
        else:
            yield key


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str) -> None:
    group, _, name = option.partition("=")
    need(name)
    cfg = config.compose([override(option)])
    if group in LISTS:
        holder = cfg.retention.policies if group == "retention" else cfg.tracker
        assert list(holder) == [name]


@pytest.mark.parametrize("option", [o for o in OPTIONS if not o.startswith("experiment")])
def test_every_option_is_typed_by_the_schema(option: str) -> None:
    group, _, name = option.partition("=")
    cfg = config.compose([override(option)])
    node = {"retention": "retention.policies." + name, "tracker": "tracker." + name}.get(group, group)
    assert OmegaConf.get_type(OmegaConf.select(cfg, node)) in config.SCHEMA.values()


def test_several_retention_policies_stand_side_by_side() -> None:
    cfg = config.compose(["retention=[keep_last,keep_best]", "retention.policies.keep_best.n=3"])
    assert cfg.retention.policies == {
        "keep_last": {"_target_": "trinity_sync.protocol.retention.KeepLast", "n": 2},
        "keep_best": {
            "_target_": "trinity_sync.protocol.retention.KeepBest",
            "metric": "reward/mean",
            "n": 3,
            "mode": "max",
        },
    }


def test_several_trackers_stand_side_by_side() -> None:
    names = {"tensorboard", "wandb", "mlflow", "trackio", "swanlab"}
    assert set(config.compose([f"tracker=[{','.join(names)}]"]).tracker) == names


@pytest.mark.parametrize("path", FILES, ids=short)
def test_every_key_has_a_one_line_comment_above_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    root = yaml.compose("\n".join(lines))
    assert isinstance(root, yaml.MappingNode)
    for key in explained_keys(root):
        line, indent = key.start_mark.line, " " * key.start_mark.column
        assert re.match(rf"{indent}# \S", lines[line - 1]), f"{key.value}: no comment above"
        assert not lines[line - 2].startswith(indent + "#"), f"{key.value}: more than one line of comment"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    first = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
    assert re.match(r"# .+[.?]$", first)


@pytest.mark.parametrize("schema", config.SCHEMA.values(), ids=config.SCHEMA)
def test_the_schema_holds_no_default(schema: type) -> None:
    held = {f.name: f.default for f in dataclasses.fields(schema) if f.name != "tracker"}
    assert set(held.values()) <= {MISSING}


@pytest.mark.parametrize("group", sorted(p.stem for p in (CONF / "base").glob("*.yaml")))
def test_an_option_repeats_no_default_of_its_base(group: str) -> None:
    base = OmegaConf.load(CONF / "base" / f"{group}.yaml")
    for option in (CONF / group).glob("*.yaml"):
        assert not (base.keys() & OmegaConf.load(option).keys()) - {"defaults"}


def test_every_key_of_the_default_configuration_has_a_value() -> None:
    assert OmegaConf.missing_keys(config.compose()) == set()


def test_the_default_experiment_is_the_measured_one() -> None:
    cfg = config.compose()
    assert (cfg.trainer.steps, cfg.trainer.lr, list(cfg.trainer.betas)) == (140, 5e-4, [0.9, 0.95])
    assert (cfg.algorithm.prompts_per_step, cfg.algorithm.samples_per_prompt) == (32, 16)
    assert (cfg.model.architecture.hidden_size, cfg.model.architecture.vocab_size) == (128, 32)
    assert (cfg.task.digits, cfg.task.response_length) == (2, 3)


def given(name: str, folder: Path) -> list[str]:
    """What an experiment cannot know, as overrides of files below a folder."""
    if name != "gsm8k":
        return []
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(ROW))
    return [f"model.path={bare_model(folder / 'model')}", f"task.path={rows}", f"task.validation.path={rows}"]


ROW = {"prompt": "1+1", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}, "extra_info": {}}


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "experiment").glob("*.yaml")))
def test_an_experiment_wins_over_the_defaults_and_loses_to_the_command_line(name: str, tmp_path: Path) -> None:
    need(name)
    cfg = config.compose([f"experiment={name}", "trainer.steps=7", *given(name, tmp_path)])
    config.check(cfg)
    assert cfg.name == name != config.compose().name
    assert cfg.trainer.steps == 7


def test_the_response_of_the_quick_experiment_fits_its_digits() -> None:
    cfg = config.compose(["experiment=quick"])
    assert (cfg.task.digits, cfg.task.response_length) == (1, 2)


def test_the_help_lists_every_option_and_marks_the_defaults() -> None:
    text = (CONF / "hydra" / "help" / "trinity.yaml").read_text()
    chosen: dict[str, Any] = {}
    for entry in OmegaConf.load(CONF / "trinity_sync.yaml").defaults:
        if isinstance(entry, DictConfig):
            chosen.update(entry)
    for group in GROUPS:
        line = re.search(rf"^ +{group} +((?:[\w*]+(?:, )?)+)", text, re.MULTILINE)
        assert line, group
        listed = {name.rstrip("*"): name.endswith("*") for name in line[1].split(", ")}
        assert set(listed) == {p.stem for p in (CONF / group).glob("*.yaml")}
        default = chosen[group] if group in LISTS else [chosen[group]]
        assert {name for name, marked in listed.items() if marked} == {name for name in default if name}


def test_the_folder_inside_an_installed_package_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trinity_sync" / "conf").mkdir(parents=True)
    monkeypatch.setattr(composition, "__file__", str(tmp_path / "trinity_sync" / "config" / "composition.py"))
    assert config.conf_dir() == tmp_path / "trinity_sync" / "conf"


def test_in_a_checkout_the_folder_lies_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trinity_sync").mkdir()
    monkeypatch.setattr(composition, "__file__", str(tmp_path / "trinity_sync" / "config" / "composition.py"))
    assert config.conf_dir() == tmp_path / "conf"
