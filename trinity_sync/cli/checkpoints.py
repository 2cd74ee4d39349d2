"""`trinity-sync ckpt`: list, inspect and verify checkpoints, prune by retention, and pin. Imports neither torch nor
Ray, so it works during a run. Each command prints text, or one JSON document with `--json`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_sync.checkpoint.folder import catalog, leases
from trinity_sync.checkpoint.folder.contents import read_tracker
from trinity_sync.checkpoint.folder.deletion import prune, prune_plan
from trinity_sync.cli.runs import ALLOW_TARGET_HELP
from trinity_sync.cli.tables import print_json, print_line, print_table
from trinity_sync.errors import ConfigError, RunError, TrinityError
from trinity_sync.protocol.parts import FULL
from trinity_sync.protocol.retention import Policy
from trinity_sync.tracking import units
from trinity_sync.tracking.run_record import read_record, recorded_checkpoints
from trinity_sync.tracking.summary import note_prunes
from trinity_sync.tracking.units import Progress, progress_bar

if TYPE_CHECKING:
    from trinity_sync.actors.monitor_client import PrunedStep
    from trinity_sync.host.references import Settings, Value

_VERDICTS = {
    "committed": "good",
    "unreadable": "CANNOT BE READ NOW",
    "newer": "OF A NEWER VERSION",
    "foreign": "OF ANOTHER RUN",
}

PATH_HELP = "folder of a run, of its checkpoints, or of one step"


def add_commands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add list, inspect, verify, prune, pin and unpin to the parser of `trinity-sync ckpt`; return its commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str, step: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
        if step:
            add_step(added, step)
        added.add_argument("--json", action="store_true", help="print one JSON document")
        added.set_defaults(command=command)
        return added

    add("list", _list, "list the checkpoints, oldest first", "this step only")
    add("inspect", _inspect, "show the contents of one checkpoint", "the step; the newest if left out")
    add("verify", _verify, "check every file against its digest; exit code 1 where one differs", "this step only")
    pruning = add("prune", _prune, "delete the checkpoints that no retention policy keeps, and say why", "")
    pruning.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    pruning.add_argument(
        "--keep",
        action="append",
        metavar="POLICY[.FIELD=VALUE]",
        help="a retention policy instead of the run's own, such as keep_last.n=3; may be given several times",
    )
    pruning.add_argument("--allow-target", action="append", default=[], metavar="PREFIX", help=ALLOW_TARGET_HELP)
    add("pin", _pin, "keep a checkpoint whatever retention says", "the step")
    add("unpin", _unpin, "leave a checkpoint to retention again", "the step")
    return commands


def add_step(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the step, as a second word or as ``--step N``."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("step", type=int, nargs="?", metavar="STEP", help=text)
    one.add_argument("--step", type=int, dest="named_step", metavar="STEP", help="the same")


def given_step(options: argparse.Namespace) -> int | None:
    """Return the step of `add_step`, if the user gave one."""
    steps = (getattr(options, name, None) for name in ("step", "named_step"))
    return next((step for step in steps if step is not None), None)


# ---- commands


def _list(options: argparse.Namespace) -> int:
    root, step = _find(options)
    infos = [catalog.with_files_seen(info) for info in of_step(root, catalog.scan(root), step)]
    pins, leased = leases.pinned(root), leases.leased(root, now=time.time())
    rows = [_row(info, pins, leased) for info in infos]
    if options.json:
        return print_json(rows)
    if not rows:
        print(f"no checkpoints in {root}")
    print_table(
        ("step", "kind", "size", "written", "digest", ""),
        [
            (
                str(row["step"]),
                row["kind"] or "-",
                units.size(row["bytes"]) if row["kind"] else "-",
                units.moment(row["created"]),
                (row["digest"] or "-") + (f" on {row['base']['digest']}" if row["base"] else ""),
                ", ".join([name for name in ("pinned", "leased") if row[name]] + row["problems"]),
            )
            for row in rows
        ],
        colours={text: "red" for row in rows for text in row["problems"]} | {"leased": "cyan", "pinned": "cyan"},
    )
    if versions := catalog.history(root):
        shared = units.size(sum(map(catalog.shared_bytes, infos)))
        told = f"{units.plural(len(versions), 'version')}, {units.size(catalog.history_bytes(root))}"
        print(f"history: {told}, {shared} shared with the checkpoints above; `trinity-sync weights` writes any version")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    root, step = _find(options)
    info = newest(root) if step is None else of_step(root, catalog.scan(root), step)[0]
    if info.manifest is None:
        raise RunError(info.problems[0])
    row = _row(info, leases.pinned(root), leases.leased(root, now=time.time()))
    manifest = info.manifest.to_json()
    if options.json:
        return print_json({**manifest, **{name: row[name] for name in ("path", "bytes", "pinned", "leased")}})
    for name in ("path", "step", "attempt", "kind", "backend", "world_size", "digest", "config_digest"):
        value = row["path"] if name == "path" else "-" if manifest[name] is None else manifest[name]
        print(f"{name:14}{value}")
    if info.manifest.base is not None:
        base = info.manifest.base
        print(f"{'base':14}{base.digest}, {base.path}: the digest above is of a LoRA adapter on it")
    print(f"{'written':14}{units.moment(row['created'])}")
    print(f"{'held':14}{', '.join(name for name in ('pinned', 'leased') if row[name]) or '-'}")
    for name, value in info.manifest.metrics.items():
        print(f"{'metric':14}{name} = {units.number(value)}")
    print(f"{'files':14}{units.plural(len(info.manifest.files), 'file')}, {units.size(row['bytes'])}\n")
    print_table(
        ("file", "size", "xxh3_128"),
        [(entry.path, units.size(entry.bytes), entry.xxh3_128) for entry in info.manifest.files],
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    root, step = _find(options)
    infos = of_step(root, catalog.scan(root), step)
    if not infos:
        raise ConfigError(f"no checkpoints in {root}; name a folder that holds some")
    total, before = sum(info.bytes for info in infos), 0
    reports = []
    with progress_bar("verifying", shown=not options.json) as progress:
        for info in infos:
            reports.append((info.step, catalog.verify(info.path, progress=partial(_advance, progress, before, total))))
            before += info.bytes
    if options.json:
        print_json(
            [
                {
                    "step": number,
                    "path": str(report.path),
                    "ok": report.ok,
                    "state": report.state,
                    "files": report.files,
                    "bytes": report.bytes,
                    "problems": list(report.problems),
                    "unlisted": list(report.unlisted),
                }
                for number, report in reports
            ]
        )
    else:
        for number, report in reports:
            amount = f"{units.plural(report.files, 'file')}, {units.size(report.bytes)}"
            line = f"step {number}: {_VERDICTS.get(report.state, 'BAD')}, {amount}"
            print_line(line, "green" if report.ok else "red")
            for line in [*report.problems, *(f"{name} is not in the manifest" for name in report.unlisted)]:
                print(f"  {line}")
    return 0 if all(report.ok for _, report in reports) else 1


def _advance(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _prune(options: argparse.Namespace) -> int:
    root, step = _find(options)
    if step is not None:
        raise ConfigError(f"{options.path} is one step; prune looks at all checkpoints together: name {root}")
    policies = _policies(options, root)
    now = time.time()
    plan = prune_plan(root, policies, now=now)
    deleted, problems = ([], []) if options.dry_run else prune(root, plan, now=now)
    warnings = [*(text for row in plan for text in row.warnings), *problems]
    if deleted:
        try:
            _tell_run(options.path, root, deleted)
        except (OSError, TrinityError) as error:
            warnings.append(f"the run's events do not record this: {error}")
    gone = {item["step"] for item in deleted}
    code = 1 if problems else 0
    if options.json:
        print_json(
            {
                "dry_run": options.dry_run,
                "checkpoints": [
                    {
                        "step": row.step,
                        "kind": row.kind,
                        "bytes": row.bytes,
                        "path": str(row.path),
                        "keep": row.keep,
                        "deleted": row.step in gone,
                        "reasons": list(row.reasons),
                    }
                    for row in plan
                ],
                "freed_bytes": sum(item["freed_bytes"] for item in deleted),
                "warnings": warnings,
            }
        )
        return code
    print_table(
        ("step", "kind", "size", "decision", "why"),
        [
            (
                str(row.step),
                row.kind,
                units.size(row.bytes),
                "keep" if row.keep else "delete" if row.step in gone or options.dry_run else "held",
                "; ".join(row.reasons),
            )
            for row in plan
        ],
        column=3,
        colours={"delete": "red", "held": "yellow", "keep": "green"},
    )
    for text in warnings:
        print(f"warning: {text}")
    sizes = [row.bytes for row in plan if not row.keep] if options.dry_run else [d["freed_bytes"] for d in deleted]
    count, freed = len(sizes), sum(sizes)
    print(
        f"{'would delete' if options.dry_run else 'deleted'} {units.plural(count, 'checkpoint')}, {units.size(freed)}"
    )
    return code


def _tell_run(path: Path, root: Path, deleted: Sequence[PrunedStep]) -> None:
    """Add the deletions to the events of the run of these checkpoints, if it has ended."""
    for run in (path, root.parent):
        if (run / "run.json").is_file() and _checkpoints_of(run).resolve() == root:
            note_prunes(run, [(item["step"], item["reason"], item["freed_bytes"]) for item in deleted], root)
            return


def _pin(options: argparse.Namespace) -> int:
    root, step = _find_one(options)
    leases.pin(root, step)
    return _report_pin(options, step, "pinned", True)


def _unpin(options: argparse.Namespace) -> int:
    root, step = _find_one(options)
    changed = leases.unpin(root, step)
    return _report_pin(options, step, "not pinned any more" if changed else "was not pinned", False)


def _report_pin(options: argparse.Namespace, step: int, text: str, pinned: bool) -> int:
    if options.json:
        return print_json({"step": step, "pinned": pinned})
    print(f"step {step}: {text}")
    return 0


# ---- finding things


def find(path: Path, step: int | None) -> tuple[Path, int | None]:
    """Return the checkpoint folder, and the step that the user named, in the path or as an argument."""
    own = _checkpoints_of(path)
    elsewhere = not own.resolve().is_relative_to(path.resolve())
    if elsewhere:
        _check_owned(path, own)
    root, in_path = catalog.locate(own if elsewhere else path)
    if step is not None and in_path not in (None, step):
        raise ConfigError(f"{path} is step {in_path}, but step {step} is asked for; name one of them")
    return root, in_path if step is None else step


def _find(options: argparse.Namespace) -> tuple[Path, int | None]:
    return find(options.path, given_step(options))


def _find_one(options: argparse.Namespace) -> tuple[Path, int]:
    root, step = _find(options)
    infos = catalog.scan(root)
    if step is None:
        there = ", ".join(str(info.step) for info in infos if info.manifest is not None) or "none"
        raise ConfigError(f"which checkpoint? Give its step after {options.path}; there are: {there}")
    of_step(root, infos, step)
    return root, step


def newest(root: Path) -> catalog.CheckpointInfo:
    """Return the newest checkpoint. Never returns an older one silently."""
    infos = catalog.scan(root)
    if not infos:
        raise ConfigError(f"no checkpoints in {root}; name a folder that holds some")
    last = infos[-1]
    older = [info.step for info in infos if info.manifest is not None]
    # only verl's checkpoints: its tracker names the newest finished one
    if last.manifest is not None or (last.state == "verl" and not older):
        return last
    named = read_tracker(root, FULL).step
    finished = next((info for info in infos if info.state == "verl" and info.step == named), None)
    if finished is not None and not older:
        return finished
    advice = f"; to take an older one, name its step: {', '.join(map(str, older))}" if older else ""
    raise RunError(f"{last.problems[0]}{advice}")


def _checkpoints_of(run: Path) -> Path:
    """Return the checkpoint folder of a run from its record; of earlier releases, from its settings."""
    recorded = None
    with suppress(ConfigError):  # `_check_owned` reports the error
        recorded = recorded_checkpoints(read_record(run / "run.json"), run)
    if recorded is not None:
        return recorded
    folder, started_in = _saved_setting(run, "checkpoint.dir")
    return Path(started_in, str(folder)) if folder else run / "checkpoints"


def _check_owned(run: Path, checkpoints: Path) -> None:
    from trinity_sync.launch.start import check_owned

    try:
        check_owned(run, checkpoints)
    except ConfigError as error:
        raise ConfigError(f"{error}. To look at the checkpoints there, name that folder in place of {run}") from error


def _saved_setting(run: Path, key: str) -> tuple[Value, str]:
    """Return a saved setting of a run (None if it has none), and the directory in which the run was started."""
    if not (run / ".hydra" / "config.yaml").is_file():
        return None, ""
    from trinity_sync.config.invocation import saved_setting  # loads Hydra

    return saved_setting(run, key)


def of_step(root: Path, infos: Sequence[catalog.CheckpointInfo], step: int | None) -> list[catalog.CheckpointInfo]:
    """Choose the infos of a step; all for None. ConfigError where there is no such step."""
    chosen = [info for info in infos if step in (None, info.step)]
    if step is not None and not chosen:
        there = ", ".join(str(info.step) for info in infos) or "none"
        raise ConfigError(f"there is no checkpoint of step {step} in {root}; there are: {there}")
    return chosen


def _policies(options: argparse.Namespace, root: Path) -> tuple[Policy, ...]:
    if options.keep:
        return given_policies(options.keep)
    for run in (options.path, root.parent):
        if _checkpoints_of(run).resolve() != root:
            continue
        policies, _ = _saved_setting(run, "retention.policies")
        if isinstance(policies, dict) and policies:
            return saved_policies(policies, options.allow_target, run)
    raise ConfigError(
        f"{options.path} is in no folder of a run, so no policies are known; give some, such as --keep keep_last.n=3"
    )


# ---- printing


def _row(info: catalog.CheckpointInfo, pins: set[tuple[int, int]], leased: set[tuple[int, int]]) -> dict[str, Any]:
    manifest = info.manifest
    key = (info.step, info.attempt or 0)
    return {
        "step": info.step,
        "attempt": info.attempt,
        "kind": info.kind,
        "state": info.state,
        "bytes": info.bytes,
        "created": manifest.created if manifest else None,
        "digest": manifest.digest if manifest else None,
        "base": manifest.base.to_json() if manifest and manifest.base else None,
        "metrics": dict(manifest.metrics) if manifest else {},
        "path": str(info.path),
        "pinned": manifest is not None and key in pins,
        "leased": manifest is not None and key in leased,
        "problems": list(info.problems),
    }


# -- retention policies of `ckpt prune`: from the command line, or saved by the run


def given_policies(keep: Sequence[str]) -> tuple[Policy, ...]:
    """Make the policies of ``--keep POLICY`` and ``--keep POLICY.FIELD=VALUE``. Raises ConfigError."""
    from hydra.errors import HydraException

    from trinity_sync import config
    from trinity_sync.config.messages import explain

    names = list(dict.fromkeys(item.partition(".")[0] for item in keep))
    fields = [f"retention.policies.{item}" for item in keep if "=" in item]
    try:
        cfg = config.compose([f"retention=[{','.join(names)}]", *fields])
    except HydraException as error:
        raise ConfigError(explain(error)) from error
    config.check(cfg)
    return config.retention_policies(cfg)


def saved_policies(nodes: Settings, allowed: Sequence[str], run: Path) -> tuple[Policy, ...]:
    """Make the policies of a run's saved settings. Another user may have made that folder, so only our own or allowed
    classes are imported.
    """
    from trinity_sync import config

    for name, node in nodes.items():
        if not isinstance(node, Mapping | None):
            raise ConfigError(f"retention.policies.{name} is {node} in the saved settings of {run}; give --keep ...")
        target = (node or {}).get(config.TARGET)
        if target is not None:
            config.check_saved_target(f"retention.policies.{name}.{config.TARGET}", str(target), allowed, run)
    return tuple(config.build_policy(name, node) for name, node in nodes.items())
