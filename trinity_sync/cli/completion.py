"""Completion in bash and zsh. `trinity-sync completion SHELL` prints a script for the shell, which then calls the
command for each completion, as Hydra's own scripts do (``-sc query=...``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

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
    *("--multirun", "--dry-run", "--cfg", "--package", "--resolve", "--config-name", "--config-dir", "--config-path"),
    *("--info", "--help", "--hydra-help", "--version"),
)
_OVERRIDES_AFTER = {"run": 1, "resume": 2, "reproduce": 2}
"""Commands with overrides, and the number of words before these."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `trinity-sync`."""
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
    return _overrides(arguments[_OVERRIDES_AFTER[command] :], word)


def _overrides(before: Sequence[str], word: str) -> list[str]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from trinity_sync.config.composition import completions
    from trinity_sync.config.messages import CommandLine

    try:
        return completions([*CommandLine.read(before).arguments, word])
    except (HydraException, OmegaConfBaseException, SystemExit, AssertionError, ValueError):
        return []  # an earlier word is wrong; the run will report it


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
