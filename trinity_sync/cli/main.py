"""The entry point of `trinity-sync`: parses the command line, calls the command, and returns the exit code. An error is
printed as one paragraph on stderr. Commands import what they need when they run.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync import __version__
from trinity_sync.cli import listing, reproduce, runs, verl_commands
from trinity_sync.errors import ConfigError, TrinityError
from trinity_sync.host.hardware import own_modules_found
from trinity_sync.host.interrupts import end_program
from trinity_sync.host.terminal import output_lost, safe_streams

if TYPE_CHECKING:
    from trinity_sync.config.description import SettingDescription
    from trinity_sync.launch.machine import Finding


_DESCRIPTION = """\
Trains with reinforcement learning, saves checkpoints without stopping the trainer, and carries each new
version of the weights to the explorers."""

_EXIT_CODES = """\
exit codes: 0 done; 1 the run or the check failed; 2 the configuration or the command line is wrong; 130 interrupted"""


_RUNS = ("run", "resume", "reproduce")
"""Commands whose result is not their output."""


def program() -> int:
    """Run the command of this process."""
    end_program()
    return main()


@safe_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 the run or the check failed, 2 the user's input is wrong, 130
    interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = _main(arguments)
    lost = arguments[:1] not in ([name] for name in _RUNS) and output_lost()
    return code or (1 if lost else 0)


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        # Hydra has options and a help of its own
        return runs.start(arguments[1:], typed=True)
    if arguments[:1] == [QUERY]:
        line = asked_line()
        answer(line, _parser(line[0]))
        return 0
    try:
        options = _parse(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except TrinityError as error:
        return _refuse(error)
    try:
        # The current folder may be part of a foreign run; its files must not be imported.
        with own_modules_found(
            *([] if options.command in (runs.resume_run_or_sweep, reproduce.reproduce_command) else [Path.cwd()])
        ):
            return int(options.command(options))
    except TrinityError as error:
        return _refuse(error)
    except BrokenPipeError:  # the reader of stdout has ended
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser(arguments[0] if arguments else None)
    options, rest = parser.parse_known_args(arguments)
    if rest and "overrides" not in options:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides := [*getattr(options, "overrides", ()), *rest]:  # argparse leaves out those after an option
        from trinity_sync.config.invocation import explained
        from trinity_sync.config.messages import check_overrides, plain_override

        options.overrides = [plain_override(text) for text in overrides]
        with explained():
            check_overrides(options.overrides)
    return options


def _refuse(error: TrinityError) -> int:
    from trinity_sync.config.messages import print_error

    print_error(str(error))
    return error.exit_code


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trinity-sync",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trinity-sync {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    runs.add_commands(commands)
    listing.add_commands(commands)
    reproduce.add_commands(commands)
    _add_commands(commands)
    verl_commands.add_commands(commands)
    _add_completion(commands)
    weights = commands.add_parser("weights", help="write the weights of any version of a run that keeps its versions")
    if chosen == "weights":
        from trinity_sync.cli import weights_commands

        weights_commands.add_weights(weights)
    follow = commands.add_parser("follow", help="keep a folder, and an engine, at the newest version of a run's store")
    if chosen == "follow":
        from trinity_sync.cli import weights_commands

        weights_commands.add_follow(follow)
    plan = commands.add_parser("plan", help="reckon the seconds, bytes and memory of syncs and saves on given machines")
    if chosen == "plan":
        from trinity_sync.cli.plan import add_plan

        add_plan(plan)
    ckpt = commands.add_parser("ckpt", help="list, inspect, verify, export, compare, prune and pin checkpoints")
    if chosen == "ckpt":
        # its commands import more than the others
        from trinity_sync.cli import checkpoints, weights_commands

        weights_commands.add_commands(checkpoints.add_commands(ckpt))
    return parser


def _add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands of this module to the parser of `trinity-sync`."""
    trace = commands.add_parser(
        "trace", help="write a timeline of a run's processes, for ui.perfetto.dev or chrome://tracing"
    )
    trace.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of the run, which may be going on")
    trace.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to (default: trace.json in the run's folder); - for standard output",
    )
    trace.set_defaults(command=_trace)
    explain = commands.add_parser(
        "explain", help="print what a setting does, its type and its default; or the settings of a group"
    )
    explain.add_argument(
        "key", nargs="+", metavar="KEY", help="a setting such as sync.interval, a group such as sync, or a question"
    )
    explain.set_defaults(command=_explain)
    doctor = commands.add_parser(
        "doctor", help="look whether runs can start here: packages, GPUs, shared memory, disk, ports"
    )
    doctor.add_argument("--measure", type=Path, metavar="FILE", help="also measure speeds, for `plan --measured FILE`")
    doctor.add_argument("--gpu", action="store_true", help="also check and measure the steps of a sync on the GPU")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="report of --gpu (default: trinity-sync-gpu.json)")
    doctor.set_defaults(command=_doctor)


# -- trinity-sync doctor


def _doctor(options: argparse.Namespace) -> int:
    from trinity_sync.launch.machine import findings

    if options.json and not options.gpu:
        raise ConfigError("--json: the file is the report of --gpu; give --gpu too")
    if options.gpu:
        from trinity_sync.cli.gpu_checks import check_gpu

        check_gpu()
    machine = []
    for found in findings():
        print(f"{found.state:<8} {found.subject:<16} {found.told}")
        machine.append(found)
    stopping = any(found.state == "error" for found in machine)
    if options.measure:
        _measure(options.measure.expanduser())
    print("a run can start here" if not stopping else "a run cannot start here until the errors are mended")
    failed = _check_gpus(options.json, machine) if options.gpu else 0
    return 1 if stopping or failed else 0


def _check_gpus(file: Path | None, machine: Sequence[Finding]) -> int:
    """Run the parts of --gpu, and return how many failed."""
    from trinity_sync.cli import gpu_checks

    file = (file or gpu_checks.FILE).expanduser()
    report = gpu_checks.GpuReport(gpu_checks.versions(), machine)
    for name, part in gpu_checks.run_parts(file, report, gpu_checks.PARTS):
        print(f"{part.result:<8} {name}: {part.told}", flush=True)
    for name, speed in report.speeds.items():
        print(f"{'measured':<8} {name:<40} {speed.gb_s:.2f} GB/s")
    count = Counter(part.result for part in report.parts.values())
    print(f"{', '.join(f'{count[key]} {key}' for key in ('passed', 'failed', 'left out'))}; the report is {file}")
    return count["failed"]


def _measure(file: Path) -> None:
    from trinity_sync.launch.machine import speeds

    try:
        found = speeds(file.parent)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--measure: {file} cannot be written: {error.strerror}; name another file") from error
    for name, rate in found.items():
        print(f"{'measured':<8} {name:<16} {rate / 1e9:.2f} GB/s")


# -- trinity-sync explain


def _explain(options: argparse.Namespace) -> int:
    from trinity_sync.config.description import answers, described, meant

    asked = " ".join(options.key)
    key = asked.lstrip("+~").partition("=")[0].rstrip(".").replace("/", ".")
    found = [key] if _told_of(key) else ("" if options.key[1:] else meant(key)[:3]) or answers(asked)[:3]
    if not found:
        keys = [one.key for one in described()]
        near = difflib.get_close_matches(key, [*keys, *{one.partition(".")[0] for one in keys}], n=4)
        told = f"near to it: {', '.join(near)}" if near else "the groups are in `trinity-sync run --help`"
        raise ConfigError(f"{asked} is not a setting; {told}")
    print("\n".join(_told_of(answer) or answer for answer in found))
    return 0


def _told_of(key: str) -> str:
    """Describe a setting or the settings below a key; empty if there is none."""
    from trinity_sync.config.description import described, group_comments

    exact = [one for one in described() if one.key == key]
    below = [one for one in described() if one.key.startswith(f"{key}.")]
    return _of_setting(key, exact) if exact else _of_group(key, group_comments(key), below) if below else ""


def _of_setting(key: str, found: Sequence[SettingDescription]) -> str:
    lines = [key]
    for one in {(one.comment, one.default, one.file): one for one in found}.values():
        options = sorted(other.option for other in found if (other.file, other.default) == (one.file, one.default))
        with_options = f" (with {', '.join(options)})" if any(options) else ""
        lines += [f"  {one.comment}", f"  type     {one.type or 'any'}", f"  default  {one.default}"]
        lines += [f"  file     {one.file}{with_options}"]
    return "\n".join(lines)


def _of_group(key: str, options: dict[str, str], found: Iterable[SettingDescription]) -> str:
    lines = [key, *(f"  {key}={name:<20} {comment}" for name, comment in options.items())]
    comments = {one.key: one.comment for one in reversed(list(found))}
    width = max(map(len, comments))
    return "\n".join([*lines, *(f"  {name:<{width}}  {comments[name]}" for name in sorted(comments))])


# -- trinity-sync trace


def _trace(options: argparse.Namespace) -> int:
    from trinity_sync.report import load, write_trace
    from trinity_sync.report.run_data import Sweep

    run = load(options.run)
    if isinstance(run, Sweep):
        raise ConfigError(f"{run.path} is a sweep; name one of its jobs, such as {run.runs[0].path}")
    if not run.metrics and not run.events:
        raise ConfigError(" ".join([f"{run.path} has recorded no events to trace.", *run.notes]))
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.output == "-":
        from trinity_sync.report.timeline import trace_document

        sys.stdout.writelines(trace_document(run))
        return 0
    print(write_trace(run, None if options.output is None else Path(options.output)))
    return 0


# -- completion in bash and zsh: the shell calls `trinity-sync -sc query=...` for it, as it calls Hydra's own programs


QUERY = "-sc"
_SCRIPTS = {
    "bash": """\
_trinity_sync() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($(COMP_LINE="$line" trinity-sync -sc query=bash 2>/dev/null))
    if [[ $COMP_WORDBREAKS == *=* ]]; then
        # bash has split the word there, and puts replies behind it
        local word="${line##* }"
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
}
complete -o nospace -o default -F _trinity_sync trinity-sync
""",
    "zsh": """\
#compdef trinity-sync
_trinity_sync() {
    local -a found
    found=("${(@f)$(COMP_LINE="${words[1,CURRENT-1]} $PREFIX" trinity-sync -sc query=zsh 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then
        compadd -Q -S '' -- "${found[@]}"
    else
        _files
    fi
}
compdef _trinity_sync trinity-sync
""",
}
_FLAGS_OF_RUN = (
    *("--multirun", "--dry-run", "--supervise", "--cfg", "--package", "--resolve", "--info", "--help", "--hydra-help"),
    *("--config-name", "--config-dir", "--config-path", "--version"),
)
_OVERRIDES_AFTER = {"run": 1, "resume": 2, "reproduce": 2}
"""Commands with overrides, and the number of words before these."""


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    completion = commands.add_parser("completion", help='print completion for a shell: eval "$(... completion bash)"')
    completion.add_argument("shell", choices=sorted(_SCRIPTS))
    completion.set_defaults(command=_print_script)


def _print_script(options: argparse.Namespace) -> int:
    print(_SCRIPTS[options.shell], end="")
    return 0


def asked_line() -> list[str]:
    """Return the words after the program up to the cursor; the last one is to be completed."""
    line = os.environ.get("COMP_LINE", "")
    line = line[: int(os.environ.get("COMP_POINT") or len(line))]
    words = line.split()
    return [*words[1:], ""] if line[-1:].isspace() or len(words) < 2 else words[1:]


def answer(line: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Print the completions of the last word, one per line; a complete word has a blank after it. `line`: see
    `asked_line`.
    """
    *before, word = line
    for text in sorted({text for text in _candidates(before, word, parser) if text.startswith(word)}):
        print(text if text.endswith(("=", ".", "/", "=[")) else f"{text} ")


def _candidates(before: Sequence[str], word: str, parser: argparse.ArgumentParser) -> list[str]:
    command = before[0] if before else ""
    inner = parser
    for name in before:
        inner = _subcommands(inner).get(name, inner)
    if word.startswith("-"):
        return list(_FLAGS_OF_RUN) if command == "run" else list(inner._option_string_actions)
    if (choices := _subcommands(inner)) and inner is not _subcommands(parser).get("run"):
        return list(choices)
    if command == "explain":
        from trinity_sync.config.description import described

        return [one.key for one in described()]
    if command == "completion":
        return sorted(_SCRIPTS)
    arguments = [text for text in before if not text.startswith("-") or command == "run"]
    if len(arguments) < _OVERRIDES_AFTER.get(command, len(before) + 2) or before[-1] in ("--config-dir", "-cd"):
        return []
    from trinity_sync.config.composition import completions
    from trinity_sync.config.messages import CommandLine

    return completions([*CommandLine.read(arguments[_OVERRIDES_AFTER[command] :]).arguments, word])


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
