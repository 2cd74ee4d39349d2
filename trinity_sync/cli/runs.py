"""The commands `run`, `resume` and `report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync import __version__
from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trinity_sync.config import Difference
    from trinity_sync.config.invocation import Invocation
    from trinity_sync.launch.start import Resume

_NEW_SETTINGS = 3
"""Up to this many new settings are listed like changes."""
ALLOW_TARGET_HELP = (
    "a package of your own that the run's saved settings may name by _target_; may be given several times"
)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser of `trinity-sync`."""
    run = commands.add_parser("run", help="run with a configuration, or a sweep; see `trinity-sync run --help`")
    run.add_argument("overrides", nargs="*", help="group=option and key=value")

    resume = commands.add_parser("resume", help="resume a run in place, from its newest good checkpoint; or a sweep")
    resume.add_argument(
        "run",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="folder of the run, or of a sweep that was cut off; without it, the newest such run is printed",
    )
    resume.add_argument("overrides", nargs="*", help="settings to change, key=value; for instance trainer.steps=200")
    resume.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="resume from an older checkpoint even if newer ones are unreadable or missing",
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
    resume.add_argument(
        "--cfg", choices=("job", "hydra", "all"), help="print the settings of the resumed run, and stop"
    )
    resume.add_argument("--resolve", action="store_true", help="with --cfg: with the values of interpolations")
    resume.add_argument("--supervise", action="store_true", help="resume the run again where its driver dies")
    resume.set_defaults(command=resume_run_or_sweep)

    report = commands.add_parser("report", help="write report.html of a run or of a sweep, and print its table")
    report.add_argument("folder", type=Path, metavar="DIR", help="folder of the run or of the sweep")
    report.add_argument("--json", action="store_true", help="print JSON instead, and write no page")
    report.add_argument("--open", action="store_true", help="open the page in the browser")
    report.set_defaults(command=_report)


def start(
    arguments: Sequence[str], *, resume: Resume | None = None, until: int | None = None, typed: bool = False
) -> int:
    """Pass a command line, without the program and `run`, to Hydra; return the exit code. Further arguments as for
    `run_main`.
    """
    if "--version" in arguments:  # of this program, not of Hydra
        print(f"trinity-sync {__version__}")
        return 0
    import hydra

    from trinity_sync import config
    from trinity_sync.launch import app

    entry = hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(_job)
    return app.run_main(entry, arguments, resume=resume, until=until, typed=typed)


def _job(cfg: DictConfig) -> float:
    from trinity_sync.launch import app

    return app.job(cfg)


def resume_run_or_sweep(options: argparse.Namespace) -> int:
    """Resume a run or a sweep, or show its settings; return the exit code."""
    if options.run is None or (not options.run.exists() and "=" in options.run.name):
        raise ConfigError(_which_run())
    folder = options.run.absolute()
    is_sweep = (folder / "multirun.yaml").is_file()
    if not options.supervise:
        return _resume(folder, options, is_sweep=is_sweep)
    from trinity_sync.launch.supervision import supervised

    with supervised(resumes=True, others={"--cfg": options.cfg, "a sweep": is_sweep}):
        return _resume(folder, options, is_sweep=False)


def _resume(folder: Path, options: argparse.Namespace, *, is_sweep: bool) -> int:
    from trinity_sync.launch.start import Resume

    if options.cfg is not None:
        return _show(folder, options)
    resume = Resume(options.from_scratch, options.skip_unreadable)
    if not is_sweep:
        return resume_run(folder, options.overrides, options.allow_target, resume)
    if options.overrides or options.from_scratch:
        raise ConfigError(
            f"{folder} is a sweep, which resumes without changes; to change a setting or start again at step 1, "
            f"name one of its jobs, such as {folder / '0'}"
        )
    from trinity_sync.cli.sweep_jobs import SweepJob, resume_sweep
    from trinity_sync.launch.local_ray import ray_kept

    def begin(job: SweepJob) -> int:
        with job.invocation.modules_found((), options.allow_target):
            settings = job.settings(options.allow_target)
            with settings.only_trusted():
                number = [f"hydra.job.{key}={job.folder.name}" for key in ("num", "id")]  # a place may use it
                return start([*number, *settings.command_line(job.folder)])

    with ray_kept():
        return resume_sweep(folder, begin=begin, go_on=lambda job: resume_run(job, (), options.allow_target, resume))


def _which_run() -> str:
    """Suggest a run to a user who named none."""
    from trinity_sync.cli.listing import runs_below
    from trinity_sync.launch.start import resume_command
    from trinity_sync.report.run_page import SweepLine
    from trinity_sync.tracking.run_end import shorten

    runs = [run for line in runs_below(None) for run in (line.jobs if isinstance(line, SweepLine) else [line])]
    cut_off = [run for run in runs if run.status in ("interrupted", "failed")]
    if not cut_off:
        return (
            "name the folder of the run to resume; no run below outputs and multirun was cut off: see trinity-sync list"
        )
    newest = cut_off[-1]
    return (
        f"name the run to resume. The newest that was cut off ({newest.status} after {newest.steps} steps): "
        f"{resume_command(newest.path.absolute(), shorten(newest.path))}; trinity-sync list shows all"
    )


def _show(folder: Path, options: argparse.Namespace) -> int:
    """Print the settings that a resume would use."""
    from trinity_sync.config.invocation import Invocation, saved_settings
    from trinity_sync.launch.start import used_places

    if (folder / "multirun.yaml").is_file():
        raise ConfigError(f"{folder} is a sweep; to see the settings of one of its jobs, name that: {folder / '0'}")
    invocation = Invocation.of_resume(folder, used_places)
    with invocation.modules_found(options.overrides, options.allow_target):
        settings = invocation.recompose(options.overrides, options.allow_target).keeping(saved_settings(folder))
        with settings.only_trusted():
            return start([*settings.command_line(folder), "--cfg", options.cfg, *["--resolve"] * options.resolve])


def resume_run(folder: Path, overrides: Sequence[str], allowed: Sequence[str], resume: Resume) -> int:
    """Resume a run in its own folder.

    The settings are composed again from the run's overrides and the new ones, checked, and saved when the next attempt
    starts, so that a mistake leaves the run as it was. Returns the exit code.
    """
    from trinity_sync.config.invocation import Invocation
    from trinity_sync.launch.start import used_places

    invocation = Invocation.of_resume(folder, used_places)
    with invocation.modules_found(overrides, allowed):
        return _go_on(folder, invocation, overrides, allowed, resume)


def _go_on(
    folder: Path, invocation: Invocation, overrides: Sequence[str], allowed: Sequence[str], resume: Resume
) -> int:
    from trinity_sync.config.invocation import saved_settings
    from trinity_sync.launch import supervision
    from trinity_sync.launch.start import PLACES, check_owned, checkpoint_folder, committed_steps, look_before_resume
    from trinity_sync.launch.sweeps import wait_until_free
    from trinity_sync.tracking.run_record import RunFolderInUse, lock_owner, read_record

    read_record(folder / "run.json")
    before = saved_settings(folder)
    settings = invocation.recompose(overrides, allowed).keeping(before)
    resume = replace(resume, started_in=invocation.started_in, given=frozenset(filter(settings.trust.gives, PLACES)))
    cfg = settings.config.anchored(invocation.started_in)
    cfg.check()
    if (driver := supervision.driver()) is not None and driver.deaths:
        wait_until_free(folder)  # until the processes of the dead driver have ended
    if owner := lock_owner(folder):
        raise RunFolderInUse(f"{folder} is in use by {owner}; stop that run before it is resumed")
    checkpoints = checkpoint_folder(cfg.settings, folder)
    check_owned(folder, checkpoints, named="checkpoint.dir" in resume.given)
    look_before_resume(cfg.settings, checkpoints, resume, committed_steps(folder / "events.jsonl", checkpoints))
    given = {key for key, _ in settings.trust.given}
    changes = before.shown_diff(settings.config)
    _tell_changes([one for one in changes if one.key not in PLACES or one.key in given])
    with settings.only_trusted():  # Hydra composes it again
        return start(settings.command_line(folder), resume=resume)


def _tell_changes(changes: Sequence[Difference]) -> None:
    """Print what a resume changes. Many settings of a later release are printed in one line."""
    from trinity_sync import config

    new = [change for change in changes if change.old == config.ABSENT]
    if len(new) > _NEW_SETTINGS:
        values = ", ".join(f"{change.key}={change.new}" for change in new)
        print(f"new since this run was started, now with these values: {values}", file=sys.stderr)
        changes = [change for change in changes if change.old != config.ABSENT]
    for change in changes:
        print(f"changed: {change.key}: {change.old} -> {change.new}", file=sys.stderr)


def _report(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder; name the folder of a run or of a sweep")
    from trinity_sync.report import load, render_json, render_table, write_report

    found = load(options.folder)
    page = None if options.json and not options.open else write_report(found)
    print(render_json(found) if options.json else f"{render_table(found)}\n{page}")
    if options.open and page is not None:
        _open(page)
    return 0


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.as_uri()):
        print(f"note: no browser could be opened; the page is {page}", file=sys.stderr)
