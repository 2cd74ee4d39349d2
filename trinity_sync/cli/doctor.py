"""The command `trinity-sync doctor`: whether runs can start on this machine."""

from __future__ import annotations

import argparse


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the parser of `trinity-sync`."""
    doctor = commands.add_parser(
        "doctor", help="look whether runs can start here: packages, GPUs, shared memory, disk, ports"
    )
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from trinity_sync.launch.machine import findings

    stopping = 0
    for found in findings():
        print(f"{found.state:<8} {found.subject:<16} {found.told}")
        stopping += found.state == "error"
    print("a run can start here" if not stopping else "a run cannot start here until the errors are mended")
    return 1 if stopping else 0
