"""Two commands side by side, lint beside the tests: `python -m tests.beside LINT TESTS...`.

Much of what the tests do is wait for processes to start, so lint costs them no time. What it says is printed in one
piece when it is done; the last line says of both how they ended. The exit code is that of the tests, or of lint where
the tests pass, and 128 and the signal's number where it was told to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def run(lint: str, tests: Sequence[str]) -> int:
    """Run both.

    Args:
        lint: a line for the shell; of lower priority than the tests.
        tests: a command, with its arguments.

    Returns:
        0 where both passed.
    """
    running: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def end(signum: int, _: object) -> None:
        """End both, whoever was told; the tests by an interrupt, after which they clear up. At once the second time."""
        told.append(signum)
        for process, gently in zip(running, (signal.SIGTERM, signal.SIGINT), strict=False):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if process.poll() is None:
                    os.killpg(process.pid, gently if len(told) == 1 else signal.SIGKILL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
    beside = subprocess.Popen(
        ["nice", "sh", "-c", lint],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # as the tests: its processes are ended together, and a terminal tells this one alone
    )
    running.append(beside)
    running.append(subprocess.Popen(tests, start_new_session=True))
    if told:  # before both were there
        end(told[0], None)
    teller = threading.Thread(target=_tell, args=(beside,))
    teller.start()
    code = running[1].wait()
    teller.join()
    print(f"lint {_ended(beside.returncode)}; tests {_ended(code)}", flush=True)
    return 128 + told[0] if told else _exit_code(code) or _exit_code(beside.returncode)


def _tell(process: subprocess.Popen[bytes]) -> None:
    said, _ = process.communicate()
    sys.stdout.write(f"\n{said.decode(errors='replace')}lint {_ended(process.returncode)}\n")
    sys.stdout.flush()


def _exit_code(code: int) -> int:
    """As a shell gives it: 128 and the signal's number for a process that a signal ended."""
    return code if code >= 0 else 128 - code


def _ended(code: int) -> str:
    return "passed" if code == 0 else f"failed (exit code {_exit_code(code)})"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
