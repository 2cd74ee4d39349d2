"""Commands for runs: run, resume and report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trinity_sync.launch.resume import Resume

ALLOW_TARGET_HELP = (
    "a package of your own that the run's saved settings may name by _target_; may be given several times"
)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the parser of `trinity-sync`."""
    run = commands.add_parser("run", help="run with a configuration, or a sweep; see `trinity-sync run --help`")
    run.add_argument("overrides", nargs="*", help="group=option and key=value")

    resume = commands.add_parser("resume", help="go on with a run, in place, from its newest good checkpoint")
    resume.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of the run")
    resume.add_argument("overrides", nargs="*", help="settings to change, key=value; for instance trainer.steps=200")
    resume.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="go on from an older checkpoint though newer ones cannot be read now, or are gone",
    )
    resume.add_argument(
        "--from-scratch",
        action="store_true",
        help="begin again at step 1; checkpoints that are there are set aside as abandoned-*",
    )
    resume.add_argument(
        "--allow-target",
        action="append",
        default=[],
        metavar="PREFIX",
        help=ALLOW_TARGET_HELP,
    )
    resume.set_defaults(command=_resume)

    report = commands.add_parser("report", help="write report.html of a run or of a sweep")
    report.add_argument("folder", type=Path, metavar="DIR", help="folder of the run or of the sweep")
    report.set_defaults(command=_report)


def start(arguments: Sequence[str], *, resume: Resume | None = None) -> int:
    """Hand a command line, without the program and `run`, to Hydra; return the exit code."""
    import hydra

    from trinity_sync import config
    from trinity_sync.launch import app

    entry = hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(_job)
    return app.run_main(entry, arguments, resume=resume)


def _job(cfg: DictConfig) -> float:
    from trinity_sync.launch import app

    return app.job(cfg)


def _resume(options: argparse.Namespace) -> int:
    """Go on with a run in its own folder.

    The settings are those of the run, composed again from the overrides it was started with, and then the new ones.
    They are checked, and then saved when the run's next attempt begins, so that a mistake leaves the run as it was.
    """
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from trinity_sync import config
    from trinity_sync.checkpoint.lock import other_run
    from trinity_sync.launch import app
    from trinity_sync.launch.resume import Resume, committed_steps
    from trinity_sync.launch.start import checkpoint_folder, look_before_resume
    from trinity_sync.tracking.run_folder import RunFolderInUse, lock_owner

    folder = options.run.absolute()
    overrides, config_name, config_dir, started_in = _read_invocation(folder)
    overrides = config.chosen_by_option(overrides)
    trusted: dict[str, Any] = {"allowed": options.allow_target, "where": folder}
    try:
        new = config.from_here(options.overrides, started_in)
        merge_overrides(overrides, new)
        with config.only_trusted_places(new, **trusted):
            old = without_foreign_keys(
                overrides,
                new,
                lambda choice: config.compose([choice], config_name=config_name, config_dir=config_dir),
            )
        overrides = merge_overrides(old, new)
        with config.only_trusted(overrides, new, **trusted):
            composed = config.compose(overrides, config_name=config_name, config_dir=config_dir)
    except (HydraException, OmegaConfBaseException, ValueError, AttributeError) as error:
        raise ConfigError(app.explain(error)) from error
    cfg = config.anchored(composed, started_in)
    config.check(cfg)
    config.check_inputs(cfg)
    if owner := lock_owner(folder):
        raise RunFolderInUse(f"{folder} is in use by {owner}; stop that run before it is resumed")
    resume = Resume(options.from_scratch, options.skip_unreadable, started_in)
    checkpoints = checkpoint_folder(cfg, folder)
    given = any(text.lstrip("+").startswith("checkpoint.dir=") for text in options.overrides)
    if not given and (other := other_run(checkpoints, folder)):
        raise ConfigError(
            f"checkpoint.dir is {checkpoints} in the saved settings of {folder}, but the run in {other} saves there; "
            "where this one is to take it over, give checkpoint.dir=... again"
        )
    look_before_resume(cfg, checkpoints, resume, committed_steps(folder / "events.jsonl", checkpoints))
    before = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert isinstance(before, DictConfig)
    for difference in config.config_diff(before, composed):
        print(f"changed: {difference.key}: {difference.old} -> {difference.new}", file=sys.stderr)
    arguments = [*overrides, f"hydra.run.dir={config.quote(str(folder))}", f"--config-name={config_name}"]
    with config.only_trusted(overrides, new, **trusted):  # Hydra composes it once more
        return start([*arguments, *([f"--config-dir={config_dir}"] if config_dir else [])], resume=resume)


def _read_invocation(folder: Path) -> tuple[list[str], str, Path | None, Path]:
    """Read how a run was started: its overrides, the primary config, the folder of further options, and where.

    Raises:
        ConfigError: there is no run in the folder.
    """
    from omegaconf import OmegaConf

    if (folder / "multirun.yaml").is_file():
        raise ConfigError(f"{folder} is a sweep; name one of its jobs, such as {folder / '0'}")
    saved = folder / ".hydra"
    lacking = [
        path for path in (folder / "run.json", saved / "overrides.yaml", saved / "hydra.yaml") if not path.is_file()
    ]
    if lacking:
        raise ConfigError(
            f"{folder} is no folder of a run: {lacking[0]} is missing; name the folder that holds run.json"
        )
    try:
        # As they were given: what they refer to stands in the configuration that they make.
        texts = OmegaConf.to_container(OmegaConf.load(saved / "overrides.yaml"), resolve=False)
        overrides = list(map(str, texts or []))
        settings = OmegaConf.load(saved / "hydra.yaml").hydra
        sources = settings.runtime.config_sources
        extra = [Path(source.path) for source in sources if source.provider == "command-line"]
        of_hydra = OmegaConf.to_container(settings.overrides.hydra, resolve=False)
        searched = [text for text in map(str, of_hydra or []) if text.startswith("hydra.searchpath=")]
        started_in = Path(settings.runtime.cwd)
        return [*overrides, *searched], str(settings.job.config_name), extra[0] if extra else None, started_in
    except Exception as error:
        raise ConfigError(f"{saved} cannot be read: {error}; name the folder of a run") from error


def without_foreign_keys(old: Sequence[str], new: Sequence[str], compose: Callable[[str], DictConfig]) -> list[str]:
    """Leave out old overrides of keys that a newly chosen option of their group does not have.

    A run with ``backend=megatron backend.tp=2`` that is resumed with ``backend=fsdp2`` has no `backend.tp` any more.

    Args:
        old, new: overrides as text.
        compose: makes the configuration with one override, the choice.
    """
    from omegaconf import OmegaConf

    kept = list(old)
    for choice in new:
        group, found, _ = choice.partition("=")
        below = [text for text in kept if text.lstrip("+").startswith(f"{group}.")]
        if not found or "." in group or not below:
            continue
        chosen = compose(choice)
        for text in below:
            key = text.lstrip("+").partition("=")[0]
            node = OmegaConf.select(chosen, key.rpartition(".")[0])
            if not text.startswith("+") and (node is None or key.rpartition(".")[2] not in node):
                kept.remove(text)
    return kept


def merge_overrides(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Put new overrides after old ones, and drop an old one that a new one replaces.

    One is replaced by a later one that does the same to the same key, so `+key=1` stays where a plain `key=2` follows:
    that needs the key to be there. Overrides therefore do not pile up, however often a run is resumed.

    Raises:
        ConfigError: one of the new ones cannot be parsed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    from trinity_sync.launch.app import explain

    try:
        parsed = OverridesParser.create().parse_overrides([*old, *new])
    except OverrideParseException as error:
        raise ConfigError(explain(error)) from error
    # a dict keeps the place of a key that is set again: take it out first, so that the last one stands last
    kept: dict[tuple[object, ...], str] = {}
    for override, text in zip(parsed, [*old, *new], strict=True):
        key = (override.type, override.get_key_element().lstrip("+~"))
        kept.pop(key, None)
        kept[key] = text
    return list(kept.values())


def _report(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is no folder; name the folder of a run or of a sweep")
    from trinity_sync.report import render_table, write_report

    page = write_report(options.folder)
    print(render_table(options.folder))
    print(page)
    return 0
