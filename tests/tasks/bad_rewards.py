"""Reward functions that do what they should not. The response says what."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.base import RewardResult


def misbehave(prompt: Prompt, response: str) -> Any:
    match response:
        case "raises":
            raise ValueError("nothing to compare")
        case "sleeps":
            time.sleep(600)
        case "holds Python's lock":
            print("holding it")
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(4)
        case "crashes":
            ctypes.string_at(0)
        case "interrupts":
            raise KeyboardInterrupt
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kills its group":
            os.killpg(0, signal.SIGKILL)
        case "closes all":
            os.closerange(3, 100)
            time.sleep(600)
        case "nan":
            return float("nan")
        case "text":
            return "0.5"
        case "nothing":
            return None
        case "unpicklable":
            return lambda: 1.0
        case "begins a line":
            print("so far", end="")
        case "prints":
            print("half a line, ", end="")
            os.write(2, b"somebody else's\n")
            print("and the rest")
        case "leaves a program behind":
            return float(subprocess.Popen(["sleep", "600"]).pid)
        case "leaves a session behind":
            return float(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        case "leaves a daemon behind":
            daemon = "(sleep 600 >&- 2>&- & echo $!)"
            said = subprocess.run(["setsid", "env", "-i", "sh", "-c", daemon], capture_output=True, check=True)
            return float(said.stdout)
        case "leaves a session behind and sleeps":
            print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
            time.sleep(600)
        case "raises much":
            raise ValueError("x" * 20_000_000)
        case "exits with much":
            sys.exit("x" * 20_000_000)
        case "has no bound":
            return "x" * 20_000_000
        case "dies afterwards":
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # nobody handles it
        case "forks and dies":
            if os.fork() == 0:
                time.sleep(600)
            os._exit(4)
        case "ends a fork":
            if not (fork := os.fork()):
                time.sleep(600)
            os.kill(fork, signal.SIGTERM)
            return float(os.waitpid(fork, 0)[1])
        case "numpy":
            return np.True_
        case "pid":
            return float(os.getpid())
    return 1.0


def runs(prompt: Prompt, response: str) -> float:
    """Runs the response as code in its own process; the reward of a prompt is its number."""
    exec(response, {})
    time.sleep(0.05)
    return float(prompt.index)


def environment(prompt: Prompt, response: str) -> float:
    """Returns 1 where a program that it starts says so."""
    return float(subprocess.run(response, shell=True, check=False).returncode == 0)


def count(prompt: Prompt, response: str) -> float:
    return float(len(response))


def in_turn(prompt: Prompt, response: str, *, fifo: str) -> float:
    with open(fifo, "rb" if response == "first" else "wb"):  # each waits for the other
        return {"first": 1.0, "last": 2.0}[response]


async def waits(prompt: Prompt, response: str) -> float:
    return 1.0


def yields(prompt: Prompt, response: str) -> Any:
    yield 1.0


def wants_more(prompt: Prompt, response: str, answer: str) -> float:
    return 1.0


def wants_less(prompt: Prompt) -> float:
    return 1.0


def has_our_key(prompt: Prompt, response: str, timeout_s: float = 1.0) -> float:
    return 1.0


class Waits:
    async def __call__(self, prompt: Prompt, response: str) -> float:
        return 1.0


class Helped:
    """Is worth 1 while the program runs that it has started when it was warmed up."""

    def warm_up(self) -> None:
        self.helper = subprocess.Popen(["sleep", "600"])

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.helper.wait(0.5)
        return RewardResult(float(self.helper.poll() is None))


class Warm:
    """Is worth 1 once it has been warmed up, in the process in which it is called."""

    warm_in = 0

    def warm_up(self) -> None:
        self.warm_in = os.getpid()

    def __call__(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
        return RewardResult(float(self.warm_in == os.getpid()))
