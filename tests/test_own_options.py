"""Options from outside the tree: a class in a user's package, and one YAML in the user's own config folder."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.cli.test_runs import StandIn, disown, first_run, launcher  # noqa: F401 - a fixture
from trinity_sync import config
from trinity_sync.cli import main as cli
from trinity_sync.config.lookup import load, missing
from trinity_sync.config.messages import explain
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.actor import Explorer, explorer_spec
from trinity_sync.explorer.texts import TextSettings
from trinity_sync.launch.actors import coordinator_option, monitor_option
from trinity_sync.launch.start import _check_engine
from trinity_sync.models.architecture import make_model
from trinity_sync.protocol.parts import FULL
from trinity_sync.protocol.retention import CheckpointFacts, decide
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.sync.base import SyncMode
from trinity_sync.sync.nccl import NcclMode
from trinity_sync.trainer.algorithms.base import algorithm_of
from trinity_sync.trainer.worker_spec import worker_spec

MARK = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the user's package `of_mine`, which notes that it was imported, and for option files below conf/."""
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine" / "__init__.py").write_text(MARK)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "of_mine"]:
        del sys.modules[name]


def imported(own: Path) -> bool:
    return (own / "of_mine" / "imported").exists()


def write(own: Path, module: str, source: str, option: str, text: str) -> None:
    (own / "of_mine" / f"{module}.py").write_text(source)
    file = own / "conf" / f"{option}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def option(target: str, base: str, **keys: Any) -> str:
    """An option file for a class with keys of its own beside those of `base`."""
    return OmegaConf.to_yaml({"defaults": [base, "/schema/own_keys@_here_", "_self_"], "_target_": target, **keys})


def composed(own: Path, *overrides: str) -> DictConfig:
    return config.compose(overrides, config_dir=own / "conf")


def refused(cfg: DictConfig, check: Any = config.check) -> str:
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    assert caught.value.exit_code == 2
    return str(caught.value)


GUEST = Path(__file__).parent / "guest"


@pytest.fixture
def guest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of `tests/e2e/test_guest.py`, where it can be imported and composed from."""
    monkeypatch.syspath_prepend(str(GUEST))
    yield GUEST
    for name in [name for name in sys.modules if name.partition(".")[0] == "guest"]:
        del sys.modules[name]


# keys


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "sync.mb_per_ss=1",
            r"sync.mb_per_ss is not a setting; sync has mode, .*, mb_per_s \(did you mean mb_per_s\?\)",
        ),
        ("sync.intervall=1", r"sync.intervall is not a setting; .* \(did you mean interval\?\)"),
        ("backend.unit_param=1", r"backend.unit_param is not a setting; .* \(did you mean unit_params\?\)"),
        ("backend.ranges=1", r"backend.ranges is not a setting; .* \(did you mean ranks\?\)"),
    ],
)
def test_a_key_that_no_option_file_has_is_refused_beside_keys_of_ones_own(
    guest: Path, override: str, told: str
) -> None:
    with pytest.raises((OmegaConfBaseException, HydraException)) as caught:
        composed(guest, "sync=paced", "backend=wrapped", override)
    assert re.fullmatch(told, explain(caught.value))
    composed(guest, "sync=paced", "backend=wrapped", f"+{override}", "backend.overrides.forward_prefetch=true")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sync.mb_per_s=fast", "sync.mb_per_s is fast; must be a number"),
        ("sync.mb_per_s=0", "sync.mb_per_s is 0; must be more than 0"),
        ("backend.unit_params=many", "backend.unit_params is many; must be a whole number"),
        ("+backend.colour=red", "backend._target_ is guest.backend.WrappedOption, which cannot be used: .*'colour'"),
        ("backend.unit_params=0", "backend.unit_params is 0; must be at least 1"),
        (
            "backend.overrides.wrap_policy=1",
            "backend.overrides.wrap_policy would take the place of backend.unit_params.*",
        ),
        (
            "retention.policies.keep_best_of_each.window=wide",
            "retention.policies.keep_best_of_each.window is wide; must be a whole number",
        ),
    ],
)
def test_a_value_that_a_class_of_ones_own_cannot_take_is_told_with_its_key(
    guest: Path, override: str, told: str
) -> None:
    cfg = composed(guest, "retention=keep_best_of_each", "sync=paced", "backend=wrapped", override)
    config.check(cfg)
    assert re.fullmatch(told, refused(cfg, config.check_inputs))


# names


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("KeepOdd", "it is not a dotted name"),
        ("of_mine.1st", "it is not a dotted name"),
        ("nowhere.KeepOdd", "there is no module nowhere"),
        ("of_mine.KeepOdd", "of_mine has no KeepOdd"),
        ("of_mine.policies.KeepEven", "of_mine.policies has no KeepEven"),
        ("of_mine.policies", "of_mine.policies is a module; name a class of it"),
        ("of_mine.policies.KeepOdd", None),
        ("of_mine.policies.Policy", None),
        ("of_mine.policies.KeepOdd.Inner", None),
        ("of_mine.any.Thing", None),
        ("of_mine.either.Chosen", None),
        ("sys.intern", None),
    ],
)
def test_a_class_is_looked_for_without_importing_anything(own: Path, name: str, reason: str | None) -> None:
    write(own, "policies", "from x import Policy\n\nclass KeepOdd(Policy):\n    class Inner: ...\n", "any/any", "")
    (own / "of_mine" / "any.py").write_text("def __getattr__(name):\n    return name\n")
    (own / "of_mine" / "either.py").write_text("try:\n    import fast as Chosen\nexcept ImportError:\n    Chosen = 1\n")
    found = missing(name)
    assert found is None if reason is None else found is not None and found.startswith(reason)
    assert not imported(own)


# retention

KEEP_ODD = """
from dataclasses import dataclass, field

from trinity_sync.errors import ConfigError
from trinity_sync.protocol.retention import DURATION, QUANTITY
from trinity_sync.protocol.retention import Policy


@dataclass(frozen=True)
class KeepOdd(Policy):
    most: int
    younger: float = field(metadata={QUANTITY: DURATION})

    def __post_init__(self):
        if self.most < 1:
            raise ConfigError(f"most is {self.most}; it has to be at least 1")

    def kept(self, checkpoints, now):
        return {c.step: "odd" for c in checkpoints if c.step % 2 and now - c.created < self.younger}


class NoPolicy:
    pass
"""

KEEP_ODD_OPTION = """
policies:
  keep_odd:
    _target_: of_mine.policies.KeepOdd
    most: 3
    younger: 1h
"""


@pytest.fixture
def keep_odd(own: Path) -> Path:
    write(own, "policies", KEEP_ODD, "retention/keep_odd", KEEP_ODD_OPTION)
    return own


def test_a_retention_policy_of_ones_own_is_an_option(keep_odd: Path) -> None:
    cfg = composed(keep_odd, "retention=[keep_odd,keep_last]", "retention.policies.keep_last.n=1")
    config.check(cfg)
    assert not imported(keep_odd), "it was loaded before the checks"
    config.check_inputs(cfg)
    policies = config.retention_policies(cfg)
    assert [type(policy).__name__ for policy in policies] == ["KeepOdd", "KeepLast"]
    facts = [CheckpointFacts(step=step, kind=FULL, created=0.0, bytes=1) for step in (1, 2, 3, 4)]
    decided = decide(facts, policies, 60.0)
    assert [decision.step for decision in decided if decision.keep] == [1, 3, 4]
    assert decided[1].reasons == ("not kept by KeepOdd, keep_last",)


def test_a_value_that_a_policy_of_ones_own_refuses_is_named_with_its_key(keep_odd: Path) -> None:
    cfg = composed(keep_odd, "retention=[keep_odd]", "retention.policies.keep_odd.most=0")
    assert refused(cfg, config.check_inputs) == "retention.policies.keep_odd.most is 0; it has to be at least 1"
    cfg = composed(keep_odd, "retention=[keep_odd]", "retention.policies.keep_odd.younger=soon")
    assert refused(cfg, config.check_inputs).startswith("retention.policies.keep_odd.younger is soon; must be a number")
    cfg = composed(keep_odd, "retention=[keep_odd]", "+retention.policies.keep_odd.colour=red")
    assert "retention.policies.keep_odd: " in refused(cfg, config.check_inputs)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("of_mine.policies.KeepEven", "of_mine.policies has no KeepEven"),
        ("of_theirs.KeepOdd", "there is no module of_theirs"),
        ("trinity_sync.protocol.retention.KeepNone", "trinity_sync.protocol.retention has no KeepNone"),
    ],
)
def test_a_retention_policy_that_is_not_there_is_refused_with_its_key(keep_odd: Path, target: str, reason: str) -> None:
    cfg = composed(keep_odd, "retention=[keep_odd]", f"retention.policies.keep_odd._target_={target}")
    assert refused(cfg).startswith(f"retention.policies.keep_odd._target_ is {target}, which cannot be used: {reason}")
    assert not imported(keep_odd)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("assert False", "AssertionError: (PLACE:2)"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere' (PLACE:2)"),
        ("import sys; sys.exit(0)", "SystemExit: 0 (PLACE:2)"),
        ("def", "SyntaxError: invalid syntax (policies.py, line 2)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_file_and_line(
    keep_odd: Path, source: str, told: str
) -> None:
    module = keep_odd / "of_mine" / "policies.py"
    module.write_text(f"class KeepOdd: ...\n{source}\n")
    message = refused(composed(keep_odd, "retention=[keep_odd]"), config.check_inputs)
    assert message.endswith(f"which cannot be used: its import raises {told}".replace("PLACE", str(module)))


def test_a_class_that_is_no_policy_is_refused_with_its_key(keep_odd: Path) -> None:
    cfg = composed(keep_odd, "retention=[keep_odd]", "retention.policies.keep_odd._target_=of_mine.policies.NoPolicy")
    config.check(cfg)
    key = "retention.policies.keep_odd._target_"
    assert refused(cfg, config.check_inputs).startswith(
        f"{key} is of_mine.policies.NoPolicy, which is not a subclass of"
    )


def test_a_saved_retention_policy_of_ones_own_has_to_be_allowed(
    keep_odd: Path,
    launcher: StandIn,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = first_run(f"--config-dir={keep_odd}/conf", "retention=[keep_odd]")
    forget(keep_odd)
    disown(folder)
    assert cli.main(["resume", str(folder)]) == 2
    assert "retention.policies.keep_odd._target_ is of_mine.policies.KeepOdd" in (said := capsys.readouterr().err)
    assert "--allow-target of_mine" in said
    (folder / "checkpoints").mkdir()
    assert cli.main(["ckpt", "prune", str(folder)]) == 2
    assert "--allow-target of_mine" in capsys.readouterr().err
    assert not imported(keep_odd)
    assert cli.main(["ckpt", "prune", str(folder), "--allow-target", "of_mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.main(["resume", str(folder), "--allow-target", "of_mine"]) == 0
    assert cli.main(["ckpt", "prune", str(folder)]) == 0, "the resume has recorded it"


def forget(own: Path) -> None:
    """Let the package be as if it had never been imported."""
    (own / "of_mine" / "imported").unlink()
    for name in [name for name in sys.modules if name.partition(".")[0] == "of_mine"]:
        del sys.modules[name]


def test_the_classes_of_our_options_may_be_named_by_saved_settings_and_their_neighbours_not(tmp_path: Path) -> None:
    key = "retention.policies.mine._target_"
    config.check_saved_target(key, "trinity_sync.protocol.retention.KeepLast", [], tmp_path)
    for elsewhere in ("task.reward._target_", "tracker.mine._target_", "explorer._target_"):
        with pytest.raises(ConfigError, match="would be imported and run"):
            config.check_saved_target(elsewhere, "trinity_sync.protocol.retention.KeepLast", [], tmp_path)
    for name in ("trinity_sync.protocol.retention.make_policy", "trinity_sync.config.lookup.load"):
        with pytest.raises(ConfigError, match="would be imported and run"):
            config.check_saved_target(key, name, [], tmp_path)


def test_a_function_with_arguments_filled_in_is_at_home_where_it_was_written(own: Path) -> None:
    (own / "of_mine" / "judges.py").write_text(
        "import os\nfrom functools import partial\nfrom trinity_sync.tasks.rewards import numeric_match\n"
        "near = partial(numeric_match, tolerance=0.01)\nfar = partial(os.system, 'true')\n"
    )
    key = "task.reward._target_"
    config.check_saved_target(key, "of_mine.judges.near", ["of_mine"], own)
    with pytest.raises(ConfigError, match=r"of_mine\.judges\.far .* would be imported and run"):
        config.check_saved_target(key, "of_mine.judges.far", ["of_mine"], own)


def test_saved_policies_of_an_older_version_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    cfg = OmegaConf.create({"retention": {"policies": {"keep_for": {"seconds": "24h"}, "keep_all": {}}}})
    OmegaConf.save(cfg, tmp_path / ".hydra" / "config.yaml")
    OmegaConf.save({"hydra": {"runtime": {"cwd": str(tmp_path)}}}, tmp_path / ".hydra" / "hydra.yaml")
    (tmp_path / "checkpoints").mkdir()
    assert cli.main(["ckpt", "prune", str(tmp_path)]) == 0


# sync modes

RDMA = """
from trinity_sync.sync.base import SyncMode


class RdmaMode(SyncMode):
    def __init__(self, *, device, timeout_s, **settings):
        self.device = device
        self.limit = timeout_s

    def publisher(self, side):
        return "publisher", self.device, side

    def transport(self, side):
        return "transport", self.device, side


class InStep(RdmaMode):
    ranks_take_part = True


class HalfAMode(SyncMode):
    def publisher(self, side): ...
"""


@pytest.fixture
def rdma(own: Path) -> Path:
    write(
        own,
        "rdma",
        RDMA,
        "sync/rdma",
        option("of_mine.rdma.RdmaMode", "/base/sync@_here_", mode="rdma", device="mlx5_0"),
    )
    return own


def test_a_sync_mode_of_ones_own_is_an_option_with_both_halves(rdma: Path) -> None:
    cfg = composed(rdma, "sync=rdma", "sync.device=mlx5_1", "sync.timeout_s=7")
    config.check(cfg)
    assert not imported(rdma), "it was loaded before the checks"
    config.check_inputs(cfg)
    mode: Any = config.build("sync", config.plain(cfg.sync), SyncMode)
    assert (mode.device, mode.limit) == ("mlx5_1", 7)
    assert mode.publisher("driver") == ("publisher", "mlx5_1", "driver")
    sent = explorer_spec(config.typed(cfg), "model", "logs").sync
    built: Any = config.build("sync", sent, SyncMode)
    assert built.transport("explorer") == ("transport", "mlx5_1", "explorer")
    assert cfg.sync.mode == "rdma"


def test_the_keys_that_modes_have_in_common_stay_typed(rdma: Path) -> None:
    with pytest.raises((OmegaConfBaseException, HydraException), match="interval"):
        composed(rdma, "sync=rdma", "sync.interval=often")
    assert refused(composed(rdma, "sync=rdma", "sync.slots=1")) == "sync.slots is 1; must be at least 2"


def test_a_mode_of_ones_own_takes_no_deltas(rdma: Path) -> None:
    message = refused(composed(rdma, "sync=rdma", "sync.encoding=delta"))
    assert message == "sync.encoding is delta, which a sync mode of your own does not take; set it to auto or full"


def test_a_mode_of_ones_own_is_given_full_versions_by_default(rdma: Path) -> None:
    cfg = composed(rdma, "sync=rdma")
    assert cfg.sync.encoding == "auto"
    assert explorer_spec(config.typed(cfg), "model", "logs").sync["encoding"] == "full"


def test_a_mode_in_whose_loads_the_ranks_take_part_needs_lockstep(rdma: Path) -> None:
    cfg = composed(rdma, "sync=rdma", "sync._target_=of_mine.rdma.InStep", "trainer.schedule=free")
    config.check(cfg)
    assert "in a round of sync=rdma the trainer's ranks take part" in refused(cfg, config.check_inputs)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("of_mine.rdma.Rdma", "of_mine.rdma has no Rdma"),
        ("of_theirs.Rdma", "there is no module of_theirs"),
        ("rdma", "it is not a dotted name"),
        ("trinity_sync.sync.memory.MemoryModus", "trinity_sync.sync.memory has no MemoryModus"),
    ],
)
def test_a_sync_mode_that_is_not_there_is_refused_with_its_key(rdma: Path, target: str, reason: str) -> None:
    message = refused(composed(rdma, "sync=rdma", f"sync._target_={target}"))
    assert message.startswith(f"sync._target_ is {target}, which cannot be used: {reason}")
    assert not imported(rdma)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("of_mine.policies.KeepOdd", "which is not a subclass of trinity_sync.sync.base.SyncMode"),
        ("of_mine.rdma.HalfAMode", "which cannot be used: Can't instantiate abstract class HalfAMode"),
    ],
)
def test_a_class_that_is_no_sync_mode_is_refused_with_its_key(
    rdma: Path, keep_odd: Path, target: str, reason: str
) -> None:
    cfg = composed(rdma, "sync=rdma", f"sync._target_={target}")
    config.check(cfg)
    assert refused(cfg, config.check_inputs).startswith(f"sync._target_ is {target}, {reason}")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["sync.mode=nccl"], "sync.mode is nccl, but the option that was chosen is sync=memory; choose sync=nccl"),
        (["sync.mode=ncll"], "sync.mode is ncll; must be one of checkpoint, memory, nccl (did you mean nccl?)"),
    ],
)
def test_a_label_that_is_not_the_options_own_is_refused(overrides: list[str], told: str) -> None:
    assert refused(config.compose(overrides)) == told


def test_a_class_of_ones_own_does_not_go_by_the_label_of_ours(rdma: Path, tiny: Path) -> None:
    cfg = composed(rdma, "sync=rdma", "sync.mode=memory")
    assert refused(cfg) == (
        "sync.mode is memory, as events and reports call trinity_sync.sync.memory.MemoryMode, but sync._target_ is "
        "of_mine.rdma.RdmaMode; give that a name of its own"
    )
    config.check(composed(tiny, "backend=tiny", "backend.strategy=fsdp2"))  # verl's name of the engine


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync=rdma", "sync.mode=nccl"],
        ["sync._target_=x.Y", "sync.mode=nccl"],
        ["backend=tiny", "backend.strategy=megatron"],
    ],
)
def test_a_class_of_ones_own_with_the_label_of_ours_is_not_taken_for_ours_in_a_resume(overrides: list[str]) -> None:
    assert config.chosen_by_option(overrides) == overrides


def test_an_option_without_a_class_is_refused(own: Path) -> None:
    write(own, "none", "", "sync/none", "defaults:\n  - /base/sync@_here_\n  - _self_\nmode: memory\n")
    assert refused(composed(own, "sync=none")) == (
        "sync._target_ names no class; choose an option of the group, sync=..., or give a dotted name"
    )


def test_a_saved_sync_mode_of_ones_own_has_to_be_allowed(
    rdma: Path,
    launcher: StandIn,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = first_run(f"--config-dir={rdma}/conf", "sync=rdma")
    forget(rdma)
    disown(folder)
    assert cli.main(["resume", str(folder)]) == 2
    assert "sync._target_ is of_mine.rdma.RdmaMode in the saved settings" in capsys.readouterr().err
    assert not imported(rdma)
    assert cli.main(["resume", str(folder), "--allow-target", "of_mine"]) == 0
    assert launcher.calls[-1].cfg.sync.device == "mlx5_0"


def test_a_saved_run_that_named_its_sync_mode_by_the_label_goes_on(launcher: StandIn) -> None:  # noqa: F811
    folder = first_run("sync=checkpoint", "sync.interval=2", "sync.max_staleness=1")
    saved = ["sync=checkpoint", "sync.mode=nccl", "sync.interval=2", "sync.max_staleness=1"]
    OmegaConf.save(OmegaConf.create(saved), folder / ".hydra" / "overrides.yaml")
    assert cli.main(["resume", str(folder)]) == 0
    sync = launcher.calls[-1].cfg.sync
    assert (sync.mode, sync._target_, sync.interval) == ("nccl", "trinity_sync.sync.nccl.NcclMode", 2)


@pytest.mark.parametrize("mode", ["memory", "checkpoint", "nccl"])
def test_every_sync_mode_of_ours_gives_both_halves(mode: str) -> None:
    cfg = config.typed(config.compose([f"sync={mode}"]))
    built: Any = config.build("sync", vars(cfg.sync), SyncMode)
    side: Any = SimpleNamespace(store=object(), use_gpu=False, deltas=Path("deltas"), versions=None, base_every=None)
    assert callable(built.publisher(side).deliver)
    assert callable(built.transport)


@pytest.mark.parametrize(
    ("transport", "use_gpu", "found"),
    [("auto", False, "gloo"), ("auto", True, "nccl"), ("gloo", True, "gloo"), ("nccl", False, "nccl")],
)
def test_rounds_choose_their_transport(transport: str, use_gpu: bool, found: str) -> None:
    side: Any = SimpleNamespace(use_gpu=use_gpu)
    assert NcclMode(transport=transport).publisher(side)._transport == found


# backends

TINY = """
from dataclasses import dataclass
from typing import ClassVar

from trinity_sync.backends.option import BackendOption
from trinity_sync.config import Problem
from trinity_sync.config.schema import BackendConfig


def check_depth(get):
    if get("backend.depth") > get("backend.ranks"):
        yield Problem("backend.depth", "is more than backend.ranks")


@dataclass(kw_only=True)
class TinyOption(BackendConfig, BackendOption):
    depth: int
    checks: ClassVar = (check_depth,)
    reads: ClassVar = frozenset({"tiny"})

    def engine_fields(self, cfg):
        return {"depth": self.depth, "seed": cfg.seed}

    def optimizer_fields(self, cfg):
        return {"lr": cfg.trainer.lr}

    def engine_configs(self, engine, optimizer):
        return engine, optimizer

    def view(self, engine, wire_dtype, keep_fp32):
        return engine
"""


@pytest.fixture
def tiny(own: Path) -> Path:
    write(
        own,
        "tiny",
        TINY,
        "backend/tiny",
        option("of_mine.tiny.TinyOption", "/base/backend@_here_", strategy="tiny", depth=2),
    )
    return own


def test_a_backend_of_ones_own_is_an_option(tiny: Path) -> None:
    cfg = composed(tiny, "backend=tiny", "backend.depth=1", "seed=5")
    config.check(cfg)
    assert not imported(tiny), "it was loaded before the checks"
    config.check_inputs(cfg)
    spec = worker_spec(config.typed(cfg), "model", "logs")
    assert (spec.engine, spec.optimizer) == ({"depth": 1, "seed": 5}, {"lr": cfg.trainer.lr})
    sent: Any = pickle.loads(pickle.dumps(spec)).backend
    assert (sent.strategy, sent.depth, sent.ranks) == ("tiny", 1, 2)
    assert sent.engine_configs(spec.engine, spec.optimizer) == (spec.engine, spec.optimizer)


def test_a_backend_of_ones_own_checks_the_configuration_as_ours_do(tiny: Path) -> None:
    cfg = composed(tiny, "backend=tiny", "backend.depth=3", "backend.overrides.ranks=3", "trainer.mini_batches=7")
    config.check(cfg)
    message = refused(cfg, config.check_inputs)
    assert message.startswith("3 settings are wrong")
    assert "\n  backend.depth is more than backend.ranks" in message
    assert "\n  backend.overrides.ranks would take the place of backend.ranks" in message
    assert "\n  algorithm.prompts_per_step times" in message


def test_a_checkpoint_goes_on_with_an_engine_that_reads_it_and_else_with_its_weights(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = map(config.typed, (config.compose(), composed(tiny, "backend=tiny")))
    assert _check_engine(theirs, tmp_path, "tiny", 9)
    assert _check_engine(ours, tmp_path, "fsdp2", 2)
    assert capsys.readouterr().err == ""
    for cfg, saved_by in ((ours, "tiny"), (theirs, "fsdp2"), (ours, "megatron")):
        assert not _check_engine(cfg, tmp_path, saved_by, 2)
        assert f"was saved by backend={saved_by}, this run goes on with" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"was saved by backend=fsdp on backend\.ranks=2, this run asks for"):
        _check_engine(ours, tmp_path, "fsdp", 2)
    (tmp_path / "actor" / "dcp").mkdir(parents=True)
    assert _check_engine(ours, tmp_path, "fsdp", 2)
    assert capsys.readouterr().err == ""
    assert _check_engine(ours, tmp_path, "fsdp", 4)
    assert "was saved by 4 trainer ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("of_mine.tiny.Tiny", "of_mine.tiny has no Tiny"),
        ("of_theirs.Tiny", "there is no module of_theirs"),
        ("trinity_sync.backends.fsdp_option.FsdpOptions", "trinity_sync.backends.fsdp_option has no FsdpOptions"),
    ],
)
def test_a_backend_that_is_not_there_is_refused_with_its_key(tiny: Path, target: str, reason: str) -> None:
    message = refused(composed(tiny, "backend=tiny", f"backend._target_={target}"))
    assert message.startswith(f"backend._target_ is {target}, which cannot be used: {reason}")


def test_a_class_that_is_no_backend_is_refused_with_its_key(tiny: Path) -> None:
    cfg = composed(tiny, "backend=tiny", "backend._target_=of_mine.tiny.BackendConfig")
    config.check(cfg)
    assert refused(cfg, config.check_inputs).startswith(
        "backend._target_ is of_mine.tiny.BackendConfig, which is not a subclass of trinity_sync.backends.option"
    )


def test_both_generations_of_fsdp_are_one_class_and_their_label_chooses(own: Path) -> None:
    cfg = config.compose(["backend.strategy=fsdp"])
    config.check(cfg)
    assert worker_spec(config.typed(cfg), "model", "logs").engine["strategy"] == "fsdp"
    assert refused(config.compose(["backend.strategy=megatron"])) == (
        "backend.strategy is megatron, but the option that was chosen is backend=fsdp, fsdp2; choose backend=megatron"
    )


def test_what_a_backend_of_ours_has_to_say_is_told_without_importing_torch() -> None:
    code = (
        "import sys\nfrom trinity_sync import config\n"
        "for name in ('fsdp', 'megatron'):\n"
        "    config.check(config.compose([f'backend={name}']))\n"
        "print([name for name in ('torch', 'ray', 'verl', 'megatron', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# explorers

PARROT = """
from trinity_sync.explorer.engine import RolloutEngine


class Parrot(RolloutEngine):
    def __init__(self, *, model_path, word, temperature, response_length, **settings):
        self.says = model_path, word, temperature, response_length
        self.settings = settings

    def destinations(self):
        return {}

    def after_load(self):
        pass

    def generate(self, prompts, task, *, step, samples_per_prompt, version):
        return self.says


class Mute:
    def __init__(self, **settings):
        pass
"""


@pytest.fixture
def parrot(own: Path) -> Path:
    write(own, "parrot", PARROT, "explorer/parrot", option("of_mine.parrot.Parrot", "hf", kind="parrot", word="hello"))
    return own


def explorer_of(cfg: DictConfig) -> Explorer:
    spec = replace(
        explorer_spec(config.typed(cfg), "model", "logs"), member=RoundMember.new("explorer-0"), log_dir=None
    )
    return Explorer(spec, None)  # type: ignore[arg-type]


def test_an_engine_of_ones_own_is_an_option_and_only_explorers_import_it(parrot: Path) -> None:
    cfg = composed(parrot, "explorer=parrot", "explorer.temperature=0.5")
    config.check(cfg)
    config.check_inputs(cfg)
    explorer = explorer_of(cfg)
    assert not imported(parrot), "it was loaded in the driver"
    explorer.start()
    engine: Any = explorer._engine
    assert engine.generate([], None, step=1, samples_per_prompt=1, version=(0, 0)) == ("model", "hello", 0.5, 3)
    assert set(engine.settings) == {
        *("dtype", "top_k", "top_p", "batch_size", "prompt_length", "seed", "attn_implementation", "trust_remote_code")
    }


def test_a_class_that_is_no_engine_is_refused_with_its_key(parrot: Path) -> None:
    cfg = composed(parrot, "explorer=parrot", "explorer._target_=of_mine.parrot.Mute")
    config.check(cfg)
    with pytest.raises(ConfigError, match=r"^explorer\._target_ is of_mine\.parrot\.Mute, which is not a subclass of"):
        explorer_of(cfg).start()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("of_mine.parrot.Macaw", "of_mine.parrot has no Macaw"),
        ("of_theirs.Parrot", "there is no module of_theirs"),
        ("trinity_sync.explorer.hf.HfEngine", "trinity_sync.explorer.hf has no HfEngine"),
    ],
)
def test_an_engine_that_is_not_there_is_refused_with_its_key(parrot: Path, target: str, reason: str) -> None:
    message = refused(composed(parrot, "explorer=parrot", f"explorer._target_={target}"))
    assert message.startswith(f"explorer._target_ is {target}, which cannot be used: {reason}")
    assert not imported(parrot)


def test_an_explorer_builds_the_engine_of_ours(tmp_path: Path) -> None:
    cfg = config.compose(["model.architecture.hidden_size=32", "model.architecture.intermediate_size=32"])
    model = make_model(config.plain(cfg.model.architecture), 0, tmp_path / "model")
    spec = explorer_spec(config.typed(cfg), str(model), "logs")
    explorer = Explorer(replace(spec, member=RoundMember.new("explorer-0"), log_dir=None), None)  # type: ignore[arg-type]
    explorer.warm_up()
    explorer.start()
    assert type(explorer._engine).__name__ == "HFEngine"
    assert explorer._engine.destinations()


def test_an_engine_is_given_the_keys_that_ours_takes() -> None:
    rows = ["task=jsonl", "task.path=some", "task.too_long=truncate", "task.chat_template.enable_thinking=false"]
    asked = config.compose(["sync.keep_fp32=[norm]", "model.lora.rank=8", *rows])
    spec = explorer_spec(config.typed(asked), "model", "logs")
    taken = {*inspect.signature(load(config.TARGET, spec.engine[config.TARGET])).parameters} - {"settings"}
    assert set(spec.engine) - {config.TARGET} == (taken | TextSettings.__annotations__.keys()) - {"device"}
    assert spec.engine["keep_fp32"] == ["norm"]


# algorithms

RAFT = """
from dataclasses import dataclass
from typing import ClassVar

from trinity_sync.config import Problem
from trinity_sync.trainer.algorithms.grpo import Grpo


def check_best(get):
    if get("algorithm.best") > get("algorithm.samples_per_prompt"):
        yield Problem("algorithm.best", "is more than algorithm.samples_per_prompt")


@dataclass(kw_only=True)
class Raft(Grpo):
    best: int
    checks: ClassVar = (*Grpo.checks, check_best)

    def loss(self, strategy):
        return strategy, self.best, self.clip_ratio


class Other:
    pass
"""


@pytest.fixture
def raft(own: Path) -> Path:
    write(own, "raft", RAFT, "algorithm/raft", option("of_mine.raft.Raft", "grpo", kind="raft", best=4))
    return own


def test_an_algorithm_of_ones_own_is_an_option(raft: Path) -> None:
    cfg = composed(raft, "algorithm=raft", "algorithm.best=3")
    config.check(cfg)
    assert not imported(raft), "it was loaded before the checks"
    config.check_inputs(cfg)
    spec = pickle.loads(pickle.dumps(worker_spec(config.typed(cfg), "model", "logs")))
    assert spec.algorithm.loss("fsdp2") == ("fsdp2", 3, 0.2)
    assert spec.algorithm.explores
    assert not spec.algorithm.recomputes
    own_level = composed(raft, "algorithm=raft", "algorithm.rollout_correction.rollout_is=token")
    assert worker_spec(config.typed(own_level), "model", "logs").algorithm.recomputes


def test_an_algorithm_of_ones_own_checks_the_configuration_as_ours_do(raft: Path) -> None:
    cfg = composed(raft, "algorithm=raft", "algorithm.best=17", "explorer.temperature=0", "trainer.mini_batches=7")
    config.check(cfg)
    message = refused(cfg, config.check_inputs)
    assert message.startswith("3 settings are wrong")
    for key in ("explorer.temperature is 0", "algorithm.best is more", "algorithm.prompts_per_step times"):
        assert f"\n  {key}" in message


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("of_mine.raft.Rafft", "of_mine.raft has no Rafft"),
        ("of_theirs.Raft", "there is no module of_theirs"),
        ("trinity_sync.trainer.algorithms.grpo.GRPO", "trinity_sync.trainer.algorithms.grpo has no GRPO"),
    ],
)
def test_an_algorithm_that_is_not_there_is_refused_with_its_key(raft: Path, target: str, reason: str) -> None:
    message = refused(composed(raft, "algorithm=raft", f"algorithm._target_={target}"))
    assert message.startswith(f"algorithm._target_ is {target}, which cannot be used: {reason}")


def test_a_class_that_is_no_algorithm_is_refused_with_its_key(raft: Path) -> None:
    cfg = composed(raft, "algorithm=raft", "algorithm._target_=of_mine.raft.Other")
    config.check(cfg)
    assert refused(cfg, config.check_inputs).startswith(
        "algorithm._target_ is of_mine.raft.Other, which is not a subclass"
    )


@pytest.mark.parametrize("group", ["backend", "algorithm", "sync"])
def test_a_class_of_ours_that_is_for_something_else_is_refused_with_its_key(group: str) -> None:
    target = "trinity_sync.protocol.retention.KeepLast"
    cfg = config.compose([f"{group}._target_={target}"])
    config.check(cfg)
    assert refused(cfg, config.check_inputs).startswith(f"{group}._target_ is {target}, which is not a subclass of")


@pytest.mark.parametrize(("name", "explores"), [("grpo", True), ("sft", False)])
def test_an_algorithm_says_whether_explorers_take_part(name: str, explores: bool) -> None:
    assert algorithm_of(config.typed(config.compose([f"algorithm={name}"])).algorithm).explores == explores


# those who save

SAVING = """
from trinity_sync.checkpoint import CheckpointCoordinator, CheckpointMonitor


class TellingMonitor(CheckpointMonitor):
    def __init__(self, *args, webhook, **kwargs):
        super().__init__(*args, **kwargs)
        self.webhook = webhook

    async def where(self):
        return self.webhook


class CountingCoordinator(CheckpointCoordinator):
    def __init__(self, *args, unit, **kwargs):
        super().__init__(*args, **kwargs)
        self.unit = unit


class Other: ...
"""

SAVING_OPTION = """
defaults:
  - default
  - _self_

monitor:
  _target_: of_mine.saving.TellingMonitor
  webhook: http://hall/told
coordinator:
  _target_: of_mine.saving.CountingCoordinator
  unit: tokens
"""


@pytest.fixture
def saving(own: Path) -> Path:
    write(own, "saving", SAVING, "checkpoint/telling", SAVING_OPTION)
    return own


def test_monitor_and_coordinator_of_ones_own_get_their_keys(saving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = composed(saving, "checkpoint=telling", "checkpoint.coordinator.unit=sequences")
    config.check(cfg)
    assert not imported(saving), "it was loaded before the checks"
    config.check_inputs(cfg)
    found, keys = monitor_option(config.typed(cfg).checkpoint)
    assert (found.__name__, keys) == ("TellingMonitor", {"webhook": "http://hall/told"})
    monkeypatch.setattr("ray.get_runtime_context", SimpleNamespace)
    make: Any = pickle.loads(pickle.dumps(coordinator_option(config.typed(cfg).checkpoint, None, 3)))  # type: ignore[arg-type]
    coordinator = make(node_id="a node", job_id="rank-1")
    assert (type(coordinator).__name__, coordinator.unit) == ("CountingCoordinator", "sequences")


@pytest.mark.parametrize("key", ["checkpoint.monitor", "checkpoint.coordinator"])
def test_who_saves_is_checked_with_its_key(saving: Path, key: str) -> None:
    message = refused(composed(saving, "checkpoint=telling", f"{key}._target_=of_mine.saving.Missing"))
    assert message.startswith(f"{key}._target_ is of_mine.saving.Missing, which cannot be used: of_mine.saving has no")
    message = refused(config.compose([f"{key}.webhook=http://hall"]))
    assert message.startswith(f"{key}.webhook is not a setting of trinity_sync.checkpoint.")
    assert refused(config.compose([f"~{key}._target_"])).startswith(f"{key}._target_ names no class")
    assert not imported(saving)
    cfg = composed(saving, "checkpoint=telling", f"{key}._target_=of_mine.saving.Other")
    config.check(cfg)
    assert refused(cfg, config.check_inputs).startswith(
        f"{key}._target_ is of_mine.saving.Other, which is not a subclass"
    )
