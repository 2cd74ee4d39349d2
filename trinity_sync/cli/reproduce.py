"""The command `trinity-sync reproduce`: repeats a run in a new folder and compares every version and metric; or writes
a bundle, one file with everything that a repetition elsewhere needs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.cli.runs import ALLOW_TARGET_HELP
from trinity_sync.errors import ConfigError

if TYPE_CHECKING:
    from trinity_sync.cli.replay import Replay, ReplaySource
    from trinity_sync.config.invocation import Recomposition
    from trinity_sync.reproduction.outcome import Comparison, EnvironmentDifference, Outcome

_RUN_DIR = "hydra.run.dir"
_MOST_SHOWN = 5
_MOST_THREADS = 64
"""Limit of threads from a record, also on a machine with fewer processors."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `trinity-sync`."""
    reproduce = commands.add_parser("reproduce", help="run a run again in a new folder, and compare the two")
    reproduce.add_argument(
        "run",
        metavar="RUN",
        help="folder of a run or of a job of a sweep; a bundle; or the name of an experiment, for its newest run here",
    )
    reproduce.add_argument("overrides", nargs="*", help="settings to change, key=value; such as hydra.run.dir=DIR")
    reproduce.add_argument("--steps", type=int, metavar="N", help="the first N steps only")
    reproduce.add_argument("--allow-target", action="append", default=[], metavar="PREFIX", help=ALLOW_TARGET_HELP)
    reproduce.add_argument("--config-dir", type=Path, metavar="DIR", help="folder of option files that the run needs")
    reproduce.add_argument(
        "--metrics-only",
        action="store_true",
        help="compare the end of the run with that of a few runs, each with a seed of its own, and not its weights: "
        "for runs that are not reproducible bit for bit",
    )
    reproduce.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of --metrics-only (default 3)")
    reproduce.add_argument(
        "--bundle", action="store_true", help="run nothing: write the settings and inputs to one file"
    )
    reproduce.add_argument("-o", "--output", type=Path, metavar="FILE", help="of --bundle (default: NAME.bundle.json)")
    reproduce.set_defaults(command=reproduce_command)


def reproduce_command(options: argparse.Namespace) -> int:
    """Repeat a run, or write a bundle of it; return the exit code."""
    from trinity_sync.cli.replay import find_source, read_source

    if options.bundle and (options.overrides or options.steps is not None):
        raise ConfigError(
            "--bundle writes an unchanged run; give the changed settings to the command that reproduces it"
        )
    given, folder = _split_folder(options.overrides)
    source = read_source(find_source(options.run), options.config_dir, given)
    if options.bundle:
        return _write_bundle(source, options.output)
    _check_comparable(source, metrics_only=options.metrics_only, repeats=options.repeats)
    with source.invocation.modules_found(given, options.allow_target):
        return _reproduce(source, given, folder, options)


def _reproduce(source: ReplaySource, given: Sequence[str], folder: Path | None, options: argparse.Namespace) -> int:
    from trinity_sync.cli.replay import replay

    settings = replay(source, given, options.allow_target)
    settings.config.check_values()  # before Hydra makes a folder of an invalid name
    steps = _steps(options.steps, source, settings)
    _take_as_many_threads(source)
    differs = _say_what_differs(source, settings)
    folder = folder or Path("outputs") / str(settings.config.select("name")) / time.strftime("%Y-%m-%d_%H-%M-%S")
    if options.metrics_only:
        return _repeat_with_seeds(source, settings, folder.absolute(), steps, options.repeats)
    return _repeat(source, settings, folder.absolute(), steps, differs)


def _write_bundle(source: ReplaySource, output: Path | None) -> int:
    from trinity_sync.cli.replay import check_digest, split_places, without_secret
    from trinity_sync.config.invocation import saved_settings
    from trinity_sync.host.masking import masked_override
    from trinity_sync.reproduction.outcome import Bundle

    if not source.place.is_dir():
        raise ConfigError(f"{source.place} is a bundle already; name the folder of a run")
    _check_known(source)
    check_digest(source, source.config)
    cfg = saved_settings(source.place).bundled()
    record = source.record
    if cfg != source.config.without_places():  # with references or secrets, the bundle's own digest is enough
        record = {**record, "config_digest": None}
    path = output or Path(Path(f"{source.config.select('name')}-{source.place.name}.bundle.json").name)
    kept, _ = split_places(source.invocation.overrides)
    for text in [text for text in kept if masked_override(text) != text]:
        print(f"left out: {masked_override(text)}: give it again where the run is reproduced", file=sys.stderr)
    Bundle(
        record=record,
        config_name=source.invocation.config_name,
        overrides=tuple(filter(None, map(without_secret, kept))),
        config=cfg.written(),
        outcome=source.outcome,
    ).write(path.absolute())
    if source.invocation.config_dir is not None:
        print(
            f"note: the run has option files of its own; send {source.invocation.config_dir} along, for --config-dir",
            file=sys.stderr,
        )
    print(path)
    return 0


# -- checks before the start


def _check_comparable(source: ReplaySource, *, metrics_only: bool, repeats: int) -> None:
    from trinity_sync.reproduction.outcome import MOST, judged

    if metrics_only and not 2 <= repeats <= MOST:
        raise ConfigError(f"--repeats is {repeats}; give 2 to {MOST} runs, from which the spread is computed")
    if metrics_only and judged(source.outcome) is None:
        raise ConfigError(f"{source.place} has no metrics to compare: there is no metrics.jsonl, or nothing in it")
    if not metrics_only and not source.record.get("reproducible", True):
        raise ConfigError(
            f"{source.place} is not reproducible bit for bit: its updates depend on timing (trainer.schedule=free), or "
            "on the kernels that a GPU chose (trainer.deterministic=false). Compare its results with those of a few "
            "runs with other seeds: --metrics-only"
        )
    _check_known(source)


def _check_known(source: ReplaySource) -> None:
    if not source.outcome:
        raise ConfigError(
            f"{source.place} has nothing to compare: it ended before its first version (status "
            f"{source.record.get('status')}), or events.jsonl is not there"
        )


def _split_folder(overrides: Sequence[str]) -> tuple[list[str], Path | None]:
    """Separate the override of the run's folder, which is Hydra's own, from the others."""
    given, folder = [], None
    for text in overrides:
        key = text.lstrip("+").partition("=")[0]
        if key == "hydra.mode":
            raise ConfigError(f"{text}: only a single run can be reproduced, not a sweep")
        if key != _RUN_DIR:
            given.append(text)
        else:
            folder = Path(_folder_name(text))
    return given, folder


def _folder_name(override: str) -> str:
    from hydra.errors import HydraException

    from trinity_sync.config.messages import explain
    from trinity_sync.config.overrides import parse

    try:
        value = parse(override).value()
    except HydraException as error:
        raise ConfigError(f"{override}: {explain(error)}") from error
    if not isinstance(value, str | int | float) or not str(value).strip() or "${" in str(value):
        raise ConfigError(f"{override} names no folder; write its name out, hydra.run.dir=DIR")
    return str(value)


def _steps(asked: int | None, source: ReplaySource, settings: Replay) -> int:
    """Return the last step of the repetition: the requested one, else the last one with results."""
    last, planned = source.outcome.steps, settings.config.settings.trainer.steps
    if asked is not None and not 1 <= asked <= last:
        raise ConfigError(f"--steps is {asked}; {source.place} has steps 1 to {last}")
    if asked is not None and not source.outcome.up_to(asked):
        raise ConfigError(f"--steps is {asked}; {source.place} has nothing to compare up to there, only later steps")
    return min(asked or max(last, 1), planned)


def _take_as_many_threads(source: ReplaySource) -> None:
    """Use the run's number of threads, unless the user sets it: sums depend on it. Bounded, since another user may have
    written that number.
    """
    threads = source.record.get("threads")
    if isinstance(threads, int) and not os.environ.get("OMP_NUM_THREADS", "").strip():
        os.environ["OMP_NUM_THREADS"] = str(min(threads, max(os.cpu_count() or 1, _MOST_THREADS)))


def _say_what_differs(source: ReplaySource, settings: Replay) -> list[EnvironmentDifference]:
    """Print the differences to the run's environment; return those that may change numbers, except settings."""
    from trinity_sync.host import hardware
    from trinity_sync.reproduction.outcome import EnvironmentDifference, differences
    from trinity_sync.tracking.run_record import git_state, package_versions

    found = os.environ.get("OMP_NUM_THREADS", "")
    differs = differences(
        source.record,
        {
            "packages": package_versions(),
            "git": git_state(Path.cwd()),
            "threads": int(found) if found.isdecimal() else None,
            "hardware": hardware.describe(),
        },
    )
    digests = {attempt.get("config_digest") for attempt in source.record.get("attempts") or []}
    if len(digests - {None}) > 1:
        differs.append(
            EnvironmentDifference(
                "settings", "several, as the run was resumed with other settings", "of the last attempt"
            )
        )
    for text in settings.left_out:
        if not text.startswith("live="):
            print(f"left out: {text} (where the run lived; give it again where it is meant)", file=sys.stderr)
    for one in settings.changed:
        print(f"changed: {one.key}: {one.old} -> {one.new}", file=sys.stderr)
    for difference in differs:
        print(f"warning: {difference}", file=sys.stderr)
    return differs


# -- running and comparing


def _run(settings: Recomposition, folder: Path, steps: int) -> int:
    from trinity_sync.cli.runs import start

    with settings.only_trusted():  # Hydra composes it again
        return start(settings.command_line(folder), until=steps)


def _repeat(
    source: ReplaySource, settings: Replay, folder: Path, steps: int, differs: Sequence[EnvironmentDifference]
) -> int:
    from trinity_sync.cli.replay import RESULT
    from trinity_sync.reproduction.outcome import compare
    from trinity_sync.tracking.json_lines import write_json

    print(f"reproducing steps 1 to {steps} of {source.place} in {folder}", file=sys.stderr)
    code = _run(settings.recomposed, folder, steps)
    if code != 0:
        return code
    comparison = compare(source.outcome.up_to(steps), _outcome(folder))
    result = {
        "of": source.place,
        "steps": steps,
        "equal": comparison.equal,
        "versions": comparison.versions,
        "metrics": comparison.values,
        "first_version": comparison.first_version and comparison.first_version._asdict(),
        "first_metrics": [one._asdict() for one in comparison.first_metrics],
        "absent": comparison.absent,
        "changed": [one._asdict() for one in settings.changed],
        "environment": [one._asdict() for one in differs],
    }
    try:  # write the result even if printing fails
        print("\n".join(_verdict(comparison, settings, differs)), flush=True)
    finally:
        write_json(folder / RESULT, result)
    return 0 if comparison.equal else 1


def _verdict(comparison: Comparison, settings: Replay, differs: Sequence[EnvironmentDifference]) -> Iterator[str]:
    from trinity_sync.tracking.units import plural

    compared = f"{plural(comparison.versions, 'version')} and {plural(comparison.values, 'value')} of metrics"
    if comparison.equal:
        yield f"equal: {compared}, bit for bit{'' if comparison.versions else '; no version was compared'}"
        return
    version, metrics = comparison.first_version, comparison.first_metrics
    if version is not None:
        yield f"differs: version {version.step} is {version.new}, and was {version.old}"
    if metrics:
        shown = [f"{one.what} {one.old} -> {one.new}" for one in metrics[:_MOST_SHOWN]]
        more = [f"and {len(metrics) - _MOST_SHOWN} more"] if len(metrics) > _MOST_SHOWN else []
        yield f"{'' if version else 'differs: '}metrics differ first at step {metrics[0].step}: " + ", ".join(
            [*shown, *more]
        )
    if comparison.absent:
        yield f"differs: the repetition has no values of step {comparison.absent[0]}"
    if not (version or metrics or comparison.absent):
        yield "nothing could be compared"
    yield f"compared: {compared}; {len(comparison.unequal)} differ"
    reasons = [f"{one.key}: {one.old} -> {one.new}" for one in settings.changed] + [str(one) for one in differs]
    yield f"differences: {'; '.join(reasons) or 'none that is recorded'}"


def _outcome(folder: Path) -> Outcome:
    from trinity_sync.reproduction.outcome import read_outcome
    from trinity_sync.tracking.run_record import read_record

    return read_outcome(folder, read_record(folder / "run.json"))


def _repeat_with_seeds(source: ReplaySource, settings: Replay, folder: Path, steps: int, repeats: int) -> int:
    from trinity_sync.cli.replay import RESULT
    from trinity_sync.reproduction.outcome import Interval, end_of, judged
    from trinity_sync.tracking.json_lines import write_json

    old = source.outcome.up_to(steps)
    name = judged(old)
    was = end_of(old, name) if name is not None else None
    if name is None or was is None:
        raise ConfigError(f"{source.place} has no finite reward or loss up to step {steps} to compare")
    ends = []
    for number in range(repeats):
        seed = settings.config.settings.seed + number
        print(f"run {number + 1} of {repeats}: seed={seed} in {folder / str(number)}", file=sys.stderr)
        code = _run(settings.recomposed.also([f"seed={seed}"]), folder / str(number), steps)
        if code != 0:
            return code
        end = end_of(_outcome(folder / str(number)), name)
        if end is None:
            print(f"differs: {name} of seed={seed} is not finite, and was {was:.6g}")
            return 1
        ends.append(end)
    interval = Interval.of(ends)
    alike = was in interval
    try:  # each of the two also where the other fails
        print(
            f"{'alike' if alike else 'differs'}: {name} at the end was {was:.6g}; of {repeats} runs with seeds "
            f"{seed - repeats + 1} to {seed} it is {', '.join(f'{end:.6g}' for end in ends)}, so that 95 % of runs end "
            f"between {interval.low:.6g} and {interval.high:.6g}",
            flush=True,
        )
    finally:
        write_json(
            folder / RESULT,
            {"of": source.place, "steps": steps, "metric": name, "was": was, "ends": ends, "alike": alike}
            | {"low": interval.low, "high": interval.high},
        )
    return 0 if alike else 1
