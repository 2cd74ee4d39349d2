"""The structure of the package: its figures, its public classes, and the walks of docs/architecture.md and sync.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests import house
from trinity_sync.config import load

DECISIONS = (house.ROOT / "docs" / "decisions.md").read_text()
WALKS = ("A version", "A full save", "A setting")
MOST_ON_A_SCREEN = 45

TARGETS = (
    "trinity_sync.backends.bytes_option.BytesOption",
    "trinity_sync.backends.fsdp_option.FsdpOption",
    "trinity_sync.backends.megatron.option.MegatronOption",
    "trinity_sync.checkpoint.coordinator.CheckpointCoordinator",
    "trinity_sync.checkpoint.monitor.CheckpointMonitor",
    "trinity_sync.explorer.bytes.BytesEngine",
    "trinity_sync.explorer.hf.HFEngine",
    "trinity_sync.explorer.vllm.VLLMEngine",
    "trinity_sync.explorer.vllm_server.VLLMServerEngine",
    "trinity_sync.launch.app.DriverLog",
    "trinity_sync.launch.app.RunHooks",
    "trinity_sync.protocol.retention.KeepAll",
    "trinity_sync.protocol.retention.KeepBest",
    "trinity_sync.protocol.retention.KeepEvery",
    "trinity_sync.protocol.retention.KeepFor",
    "trinity_sync.protocol.retention.KeepLast",
    "trinity_sync.protocol.retention.KeepVersions",
    "trinity_sync.protocol.retention.KeepWithinBudget",
    "trinity_sync.sync.checkpoint.CheckpointMode",
    "trinity_sync.sync.memory.MemoryMode",
    "trinity_sync.sync.nccl.NcclMode",
    "trinity_sync.tasks.conversations.ConversationsTask",
    "trinity_sync.tasks.copy_digits.CopyDigits",
    "trinity_sync.tasks.jsonl.JsonlTask",
    "trinity_sync.tasks.pairs.PairsTask",
    "trinity_sync.tasks.rewards.exact_match",
    "trinity_sync.tasks.verl.VerlTask",
    "trinity_sync.tasks.rewards.WeightedSum",
    "trinity_sync.tasks.rewards.contains_answer",
    "trinity_sync.tasks.rewards.numeric_match",
    "trinity_sync.tracking.mlflow.MlflowTracker",
    "trinity_sync.tracking.swanlab.SwanlabTracker",
    "trinity_sync.tracking.tensorboard.TensorBoardTracker",
    "trinity_sync.tracking.trackio.TrackioTracker",
    "trinity_sync.tracking.wandb.WandbTracker",
    "trinity_sync.trainer.algorithms.bytes.Bytes",
    "trinity_sync.trainer.algorithms.grpo.Grpo",
    "trinity_sync.trainer.algorithms.sft.Sft",
)
"""The classes that conf/ has named in a release. Saved configurations name them, so each has to be found for good."""


@cache
def figures() -> dict[str, float]:
    return house.figures()


@pytest.mark.parametrize("name", house.LIMITS)
def test_a_figure_is_within_its_limit(name: str) -> None:
    assert figures()[name] <= house.LIMITS[name], f"{name}: python -m tests.house shows the places"


@pytest.mark.parametrize("name", [name for name, limit in house.LIMITS.items() if limit > house.AIMS[name]])
def test_a_limit_above_its_aim_has_a_reason(name: str) -> None:
    assert f"**{name}**" in DECISIONS


COMPOSING = {
    "config/": "it composes",
    "host/references.py": "reports read saved settings without the schema",
    "launch/app.py": "Hydra calls it",
    "cli/runs.py": "Hydra calls it",
    "cli/verl_commands.py": "it reads verl's own configuration",
}
"""The modules that handle configurations of OmegaConf, with the reason."""


def test_configurations_of_omegaconf_stay_in_config() -> None:
    importing = [
        path
        for path, text in house.modules().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "omegaconf"
    ]
    assert [path for path in importing if not path.startswith(tuple(COMPOSING))] == []


@pytest.mark.parametrize("name", TARGETS)
def test_a_class_that_a_saved_configuration_names_is_found(name: str) -> None:
    assert load("key", name).__name__ == name.rpartition(".")[2]


def test_each_class_that_conf_names_is_among_them() -> None:
    named = {
        name
        for path in house.ROOT.glob("conf/**/*.yaml")
        for name in re.findall(r"^\s*(?:_target_|class): (trinity_sync\.[\w.]+)$", path.read_text(), re.MULTILINE)
    }
    assert named - set(TARGETS) == set()
    assert named > {"trinity_sync.explorer.hf.HFEngine", "trinity_sync.launch.app.DriverLog"}


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_places_that_exist(title: str) -> None:
    hops = house.walk(title)
    assert len(hops) > 3
    for hop in hops:
        assert _definition(hop) is not None, f"{hop.path} has no {hop.name}"


def test_the_timeline_of_each_mode_names_places_that_exist() -> None:
    hops = house.walk("The protocol", "sync.md")
    assert {"sync/memory.py", "sync/checkpoint.py", "sync/nccl.py"} < {hop.path for hop in hops}
    for hop in hops:
        assert _definition(hop) is not None, f"{hop.path} has no {hop.name}"


@pytest.mark.parametrize("title", WALKS)
def test_each_place_of_a_walk_is_called_by_one_before_it(title: str) -> None:
    """Across a process, too: a call through a client has the name of the method that it reaches."""
    first, *rest = house.walk(title)
    called = _mentioned(first)
    for hop in rest:
        assert hop.name.rpartition(".")[2] in called, f"nothing before calls {hop.path}::{hop.name}"
        called |= _mentioned(hop)


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_fits_on_a_screen(title: str) -> None:
    assert len(house.section(title).splitlines()) <= MOST_ON_A_SCREEN


def test_a_run_of_equal_lines_is_a_duplicate() -> None:
    run = "".join(f"    call_{number}(first, second)\n" for number in range(house.RUN))
    texts = {"a.py": f"def one():\n{run}", "b.py": f"import os\n\ndef two():\n    os.sync()\n{run}"}
    assert list(house.duplicates(texts)) == ["a.py:2 and b.py:5"]
    assert not list(house.duplicates({"a.py": texts["a.py"]}))


def test_the_parameters_of_an_override_are_no_duplicate() -> None:
    parameters = "".join(f"    parameter_{number}: int,\n" for number in range(house.RUN))
    header, body = f"def one(\n{parameters}) -> None:\n", "".join(f"    call_{n}()\n" for n in range(house.RUN))
    assert not list(house.duplicates({"a.py": f"{header}    first()\n", "b.py": f"{header}    second()\n"}))
    assert list(house.duplicates({"a.py": header + body, "b.py": header + body})) == ["a.py:9 and b.py:9"]


def test_docstrings_and_comments_are_no_code() -> None:
    text = '"""What it is.\n\nMore."""\n\nX = (\n    1  # why\n)\n"""Of X."""\n# done\n'
    assert list(house.code_lines(text)) == [5, 6, 7]


def test_an_underscore_does_not_tell_two_class_names_apart() -> None:
    assert house.repeated_classes({"a.py": "class Part: ...\n", "b.py": "class _Part: ...\n"}) == ["Part"]


@pytest.mark.parametrize("name", ["_Of", "PartFailed", "HFPending", "Copying", "RankDied", "Saved2Done"])
def test_a_class_name_that_does_not_end_in_a_noun_is_found(name: str) -> None:
    assert house.no_nouns({"a.py": f"class {name}: ...\n"}) == [name]


@pytest.mark.parametrize("name", ["_SavedTensor", "LoadError", "RankMeeting", "HFEngine", "Sft", "Qwen2", "VLLMBase"])
def test_a_class_name_that_ends_in_a_noun_is_not(name: str) -> None:
    assert not house.no_nouns({"a.py": f"class {name}: ...\n"})


def _definition(hop: house.Hop) -> ast.AST | None:
    found: ast.AST | None = _tree(house.PACKAGE / hop.path)
    for name in hop.name.split("."):
        found = next((node for node in getattr(found, "body", ()) if getattr(node, "name", None) == name), None)
    return found


def _mentioned(hop: house.Hop) -> set[str]:
    """The names that a place uses; of a method's class, all of them, since its threads and queues begin elsewhere."""
    place = _definition(hop._replace(name=hop.name.partition(".")[0]))
    nodes = ast.walk(place) if place is not None else ()
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in nodes
        if isinstance(node, ast.Attribute | ast.Name)
    }


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
