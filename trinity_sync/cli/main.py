"""The command `trinity-sync`: run, resume, list, watch, report, trace and the tools for checkpoints. Each imports what
it needs.

`main` is the entry point of the installed script. It returns the exit code and prints an error as one paragraph on
stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_sync import __version__
from trinity_sync.cli import completion, doctor, explain, listing, reproduce, runs, trace, verl, watch
from trinity_sync.errors import TrinityError
from trinity_sync.host.module_path import own_modules_found
from trinity_sync.host.terminal import output_lost, safe_streams

_DESCRIPTION = """\
Trains with reinforcement learning, saves checkpoints without stopping the trainer, and carries each new
version of the weights to the explorers."""

_EXIT_CODES = """\
exit codes: 0 done; 1 the run or the check failed; 2 the configuration or the command line is wrong; 130 interrupted"""


_RUNS = ("run", "resume", "reproduce")
"""Commands whose result is not their output."""


@safe_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program; None for `sys.argv`.

    Returns:
        The exit code: 0 done, 1 the run or the check failed, 2 something the user gave is wrong, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = _main(arguments)
    lost = arguments[:1] not in ([name] for name in _RUNS) and output_lost()
    return code or (1 if lost else 0)


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        # Hydra has options and a help of its own
        return runs.start(arguments[1:])
    if arguments[:1] == [completion.QUERY]:
        line = completion.asked_line()
        completion.answer(line, _parser(line[0]))
        return 0
    try:
        options = _parse(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        # The current folder may be part of a foreign run; its files must not be imported.
        with own_modules_found(
            *([] if options.command in (runs.resume_run_or_sweep, reproduce.reproduce_command) else [Path.cwd()])
        ):
            return int(options.command(options))
    except TrinityError as error:
        return _refuse(error)
    except BrokenPipeError:  # the watching ended before the run did
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser(arguments[0] if arguments else None)
    options, rest = parser.parse_known_args(arguments)
    # argparse takes positional arguments in one go, and so leaves overrides that stand after an option.
    if rest and ("overrides" not in options or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides := [*getattr(options, "overrides", ()), *rest]:
        from trinity_sync.launch.command_line import plain_override

        options.overrides = [plain_override(text) for text in overrides]
    return options


def _refuse(error: TrinityError) -> int:
    from trinity_sync.launch.messages import print_error

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
    watch.add_commands(commands)
    reproduce.add_commands(commands)
    trace.add_commands(commands)
    explain.add_commands(commands)
    doctor.add_commands(commands)
    verl.add_commands(commands)
    completion.add_commands(commands)
    ckpt = commands.add_parser("ckpt", help="list, inspect, verify, export, compare, prune and pin checkpoints")
    if chosen == "ckpt":
        # what its commands need is imported only where one is asked for
        from trinity_sync.cli import checkpoints, weights

        weights.add_commands(checkpoints.add_commands(ckpt))
    return parser
