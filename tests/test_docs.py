"""The documentation names what there is: modules, files, links; and its examples do what it says of them."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.pages import PAGES, ROOT, blocks, example_files, settings, settings_named, write_examples
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.engine import RolloutEngine
from trinity_sync.launch.actors import coordinator_option
from trinity_sync.protocol.parts import FULL
from trinity_sync.protocol.retention import CheckpointFacts
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.record import Prompt
from trinity_sync.sync.base import Delivery, SyncMode
from trinity_sync.tracking.trackers import TrackedRun, build_trackers
from trinity_sync.trainer.algorithms.base import algorithm_of
from trinity_sync.trainer.worker_spec import worker_spec


def defined(dotted: str) -> bool:
    """Whether a name such as ``trinity_sync.sync.stream.receive`` is a module, or stands in the module that it begins
    with. Nothing is imported.
    """
    words = dotted.split(".")
    for length in range(len(words), 0, -1):
        path = ROOT.joinpath(*words[:length])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            return length == len(words) or bool(re.search(rf"\b{words[length]}\b", module.read_text()))
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_modules_that_there_are(page: Path) -> None:
    dotted = set(re.findall(r"(?<!pkg://)\btrinity_sync(?:\.\w+)+", page.read_text()))
    assert not [name for name in dotted if not (defined(name) or (ROOT / name.replace(".", "/")).exists())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_there_are(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"`((?:trinity_sync|tests|docs|benchmarks)/[\w/.-]+|[\w-]+(?:/[\w-]+)*/[\w-]+\.py)`", text))
    assert not [name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "trinity_sync"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_blocks_of_bash(page: Path) -> None:
    """Only those are tried."""
    programs = r"^(?:\$ |\. |[A-Z]+=\S* )*(?:\S*/)?(?:python|trinity-sync|make|pip|uv|git)3? "
    others = [block.text for block in blocks(page) if block.language != "bash"]
    assert not [text for text in others if re.search(programs, text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_settings_that_there_are(page: Path) -> None:
    named = settings_named(page)
    if page.name == "verl-reference.md":  # verl's own, which stand on the left, or are said to be verl's
        text = re.sub(r"^\| [^|]* \| ", "| | ", page.read_text(), flags=re.MULTILINE).replace("verl's `", "verl's ")
        named = {key for key in named if key in text and not re.search(rf"verl's {re.escape(key)}", text)}
    handed_on = (
        "backend.overrides.",
        "checkpoint.mirror_options.",
        "explorer.engine.",
        "task.chat_template.",
        "task.reward.weights",
    )
    unknown = {key for key in named - settings() if not key.startswith(handed_on)}
    assert not {key for key in unknown if not key.endswith((".py", ".jsonl"))}


def test_pages_name_commands_and_their_options_that_there_are() -> None:
    """Also where that is no whole command: ``trinity-sync ckpt list|verify``, ``trinity-sync reproduce --bundle``."""
    known = _commands_of(cli._parser("ckpt"))
    known |= {name: _commands_of(cli._parser(name))[name] for name in ("weights", "follow", "plan")}
    for page in PAGES:
        for code in re.findall(r"`trinity-sync ([^`\n]+)`", page.read_text()):
            words = code.split()
            group, names = ("ckpt ", words[1]) if words[0] == "ckpt" and len(words) > 1 else ("", words[0])
            options = re.findall(r"--[\w-]+", code)
            for name in names.split("|"):
                assert f"{group}{name}" in known, f"{page.name}: {code}"
                assert f"{group}{name}" == "run" or {*options} <= known[f"{group}{name}"], f"{page.name}: {code}"


def test_pages_name_targets_of_make_and_extras_that_there_are() -> None:
    text = "".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][\w-]*)", text)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"trinity-sync\[(\w+)\]", text)) <= extras.keys()


def _commands_of(parser: argparse.ArgumentParser, above: str = "") -> dict[str, set[str]]:
    """The options of each command of a parser, and of the commands of those."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[f"{above}{name}"] = set(command._option_string_actions)
                found |= _commands_of(command, f"{above}{name} ")
    return found


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the guide to extending, written where they can be imported and composed from."""
    assert set(example_files()) == {
        *("my_tasks.py", "my_trackers.py", "my_policies.py", "my_modes.py", "my_backends.py"),
        *("my_conf/task/sums.yaml", "my_conf/tracker/csv.yaml", "my_conf/retention/keep_mondays.yaml"),
        *("my_conf/sync/waves.yaml", "my_conf/backend/gathered.yaml"),
        *("my_rewards.py", "my_algorithms.py", "my_engines.py", "my_conf/experiment/sums_long.yaml"),
        *("my_conf/algorithm/scaled.yaml", "my_conf/explorer/timed.yaml"),
        *("my_saving.py", "my_conf/checkpoint/timed.yaml"),
    }
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in tmp_path.glob("*.py"):  # other tests have modules of these names, too
        sys.modules.pop(file.stem, None)
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_the_task_of_the_guide_composes_and_judges(examples: Path) -> None:
    cfg = config.compose(["task=sums"], config_dir=examples / "my_conf")
    config.check(cfg)
    config.check_inputs(cfg)
    task = config.build_task(cfg.task, cfg.seed)
    prompts = task.prompts(3, 5)
    assert prompts == config.build_task(cfg.task, cfg.seed).prompts(3, 5)
    assert [prompt.index for prompt in prompts] == list(range(5))
    assert task.reward(Prompt(index=0, text="1+2=", answer="3"), "3", True) == (1.0, 1.0)
    assert task.reward(prompts[0], "no", True) == (0.0, 0.0)


def test_the_tracker_of_the_guide_composes_and_writes(examples: Path) -> None:
    cfg = config.compose(["tracker=[csv,tensorboard]"], config_dir=examples / "my_conf")
    config.check(cfg)
    tracker, _ = build_trackers(OmegaConf.to_container(cfg.tracker))  # type: ignore[arg-type]
    tracker.start(TrackedRun(folder=examples, name="a run"))
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert (examples / "metrics.csv").read_text() == "1,loss,0.5\n"


def test_the_policy_of_the_guide_composes_and_keeps_mondays(examples: Path) -> None:
    cfg = config.compose(["retention=[keep_mondays,keep_last]"], config_dir=examples / "my_conf")
    config.check(cfg)
    mondays, _ = config.retention_policies(cfg)
    monday, tuesday = 1_700_481_600.0, 1_700_568_000.0
    saved = [
        CheckpointFacts(step=step, kind=FULL, created=created, bytes=1) for step, created in ((1, monday), (2, tuesday))
    ]
    assert mondays.kept(saved, monday + 7 * 86400) == {1: "a Monday"}
    assert mondays.kept(saved, monday + 5 * 7 * 86400) == {}


def test_the_sync_mode_of_the_guide_composes_and_delivers_in_waves(
    examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config.compose(["sync=waves", "sync.at_once=2"], config_dir=examples / "my_conf")
    config.check(cfg)
    config.check_inputs(cfg)
    waves: list[list[str]] = []

    def load(side: Any, explorers: dict[str, Any], version: Version) -> Delivery:
        waves.append(list(explorers))
        return Delivery(reports=[*explorers.values()])

    monkeypatch.setattr("trinity_sync.sync.memory.deliver_each", load)
    side: Any = None
    publisher = config.build("sync", config.plain(cfg.sync), SyncMode).publisher(side)  # type: ignore[type-abstract]
    explorers: Any = {"a": 1, "b": 2, "c": 3}
    assert publisher.deliver(explorers, Version(0, 5)).reports == [1, 2, 3]
    assert waves == [["a", "b"], ["c"]]
    cfg.sync.at_once = 0
    with pytest.raises(ConfigError, match=r"^sync\.at_once is 0; must be at least 1$"):
        config.check_inputs(cfg)


def test_the_backend_of_the_guide_composes_and_sets_what_verl_knows(examples: Path) -> None:
    cfg = config.compose(["backend=gathered"], config_dir=examples / "my_conf")
    config.check(cfg)
    config.check_inputs(cfg)
    spec = worker_spec(config.typed(cfg), "model", "logs")
    engine, _ = spec.backend.engine_configs(spec.engine, spec.optimizer)
    assert (engine.strategy, engine.reshard_after_forward) == ("fsdp2", False)
    cfg.backend.overrides = {"reshard_after_forward": True}
    with pytest.raises(ConfigError, match=r"would take the place of backend\.reshard"):
        config.check_inputs(cfg)


def test_the_reward_of_the_guide_counts_digits(examples: Path) -> None:
    reward = importlib.import_module("my_rewards").digits_right
    asked = Prompt(index=0, text="12=", answer="21")
    assert reward(asked, "21", finished=True, whole=2) == 3.0
    assert reward(asked, "20", finished=True) == 0.5


def test_the_experiment_of_the_guide_composes(examples: Path) -> None:
    cfg = config.compose(["experiment=sums_long", "trainer.lr=0.001"], config_dir=examples / "my_conf")
    config.check(cfg)
    assert (cfg.sync.mode, cfg.trainer.steps, cfg.trainer.lr) == ("nccl", 400, 0.001)
    assert set(cfg.retention.policies) == {"keep_last", "keep_best"}


def test_the_algorithm_of_the_guide_composes_checks_and_scales(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config.compose(["algorithm=scaled"], config_dir=examples / "my_conf")
    config.check(cfg)
    config.check_inputs(cfg)
    monkeypatch.setattr("trinity_sync.trainer.algorithms.grpo.Grpo.loss", lambda self, strategy: lambda: (3.0, {}))
    assert algorithm_of(config.typed(cfg).algorithm).loss("fsdp2")() == (1.5, {})
    cfg.algorithm.scale = 0.0
    with pytest.raises(ConfigError, match=r"algorithm\.scale has to be more than 0"):
        config.check_inputs(cfg)


def test_the_coordinator_of_the_guide_composes_and_tells_what_took_long(
    examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config.compose(["checkpoint=timed", "checkpoint.coordinator.slow_s=0.0"], config_dir=examples / "my_conf")
    config.check(cfg)
    config.check_inputs(cfg)
    monkeypatch.setattr("ray.get_runtime_context", SimpleNamespace)
    make: Any = coordinator_option(config.typed(cfg).checkpoint, None, 3)  # type: ignore[arg-type]
    saved: list[object] = []
    kind = "trinity_sync.checkpoint.coordinator.CheckpointCoordinator"
    monkeypatch.setattr(f"{kind}.save_async", lambda self, name, save_fn, step, **named: saved.append(save_fn()))
    make(node_id="a node", job_id="rank-1").save_async("model", lambda: "written", 20, part="rank-0")
    assert saved == ["written"]
    assert capsys.readouterr().out.startswith("step 20: model took 0.0 s to write")


def test_the_engine_of_the_guide_composes_and_tells_what_took_long(
    examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config.compose(["explorer=timed", "explorer.slow_s=0.0"], config_dir=examples / "my_conf")
    config.check(cfg)
    config.check_inputs(cfg)
    monkeypatch.setattr("trinity_sync.explorer.hf.HFEngine.__init__", lambda self, **settings: None)
    monkeypatch.setattr("trinity_sync.explorer.hf.HFEngine.generate", lambda self, prompts, task, **how: "samples")
    engine: Any = config.load_class("explorer._target_", cfg.explorer._target_, RolloutEngine)(slow_s=0.0)
    assert engine.generate(["a"], None, step=3) == "samples"
    assert capsys.readouterr().out.startswith("step 3: 1 prompts took 0.0 s")
