"""Running `launch.py` as a user does, and reading what it leaves. Shared by the end-to-end tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_trace import check
from trinity_sync.checkpoint.export import export_checkpoint
from trinity_sync.report import timeline
from trinity_sync.report.run_data import load_run
from trinity_sync.tracking import json_lines

ROOT = Path(__file__).parents[2]

# Small enough that a step costs next to nothing; the start-up of the processes is what these tests pay for.
SMALL = [
    "live=line",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=4",
    "trainer.steps=3",
    "checkpoint.interval=2",
]
LIMIT_S = 400


def initial_digest(folder: Path) -> str:
    """Version digest of the safetensors file that the run in this folder started from."""
    from safetensors.torch import load_file

    from trinity_sync.weights.tensors import state_digest

    return state_digest(load_file(folder / "model" / "model.safetensors"), "BF16")


@dataclass
class Run:
    """A finished run: its folder, exit code and output."""

    folder: Path
    code: int
    output: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if event["event"] == name]

    @property
    def digests(self) -> dict[int, str]:
        """Published digest by step."""
        return {event["version"]: event["digest"] for event in self.events("publish")}

    @property
    def manifests(self) -> dict[int, dict[str, Any]]:
        """Manifest by step of what is in the checkpoint folder."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("checkpoints/global_step_*/manifest.json")]
        return {manifest["step"]: manifest for manifest in found}

    def assert_the_same_weights_everywhere(self, versions: list[int], saved: list[int], explorers: int) -> None:
        """Hold a run that is to have completed against what it is to have done.

        Args:
            versions: steps that it published, each of which every explorer loaded.
            saved: steps of its full checkpoints; of those that are kept the weights are the versions'.
        """
        assert self.code == 0, self.output
        assert self.record["status"] == "completed"
        assert sorted(self.digests) == versions
        assert self.digests[0] == initial_digest(self.folder)

        loads = self.events("load")
        assert len(loads) == len(versions) * explorers
        assert all(load["digest"] == self.digests[load["version"]] for load in loads)

        assert sorted(event["step"] for event in self.events("commit") if event["kind"] == "full") == saved
        self.assert_what_is_saved_is_what_was_published(last=saved[-1])
        self.assert_timed()
        assert not self.events("fault")

    def assert_timed(self) -> None:
        """All of it happened within the run, by the driver's clock, and for each explorer one thing after the other."""
        run = load_run(self.folder)
        lanes = timeline.span_lanes(timeline.spans(run.metrics, run.events))
        explorers = {who: spans for who, spans in lanes.items() if who.startswith("explorer-")}
        assert set(lanes) - set(explorers) == {"trainer", "node agents", "checkpoints"}
        assert sorted(explorers) == self.summary["sync"]["explorers"]
        assert run.start is not None
        for who, spans in lanes.items():
            assert run.start < spans[0].begin
            assert max(span.end for span in spans) < self.record["ended"]
            assert len(timeline.span_rows(spans)) == 1 or who not in explorers
        for spans in explorers.values():
            assert {span.what for span in spans} == {"generate", "load"}
        assert {span.what for span in lanes["node agents"]} == {"digest", "publish"}
        assert all(len(span.parts) == 2 for span in lanes["checkpoints"])
        assert all(self.digests.get(event["version"]) for event in self.events("generate"))
        check(json.loads("".join(timeline.trace_document(run)))["traceEvents"])

    def assert_begins_with(self, step: int) -> None:
        """The newest attempt publishes the weights of the checkpoint of a step first, bit for bit."""
        attempt = self.record["attempt"]
        first = next(event for event in self.events("publish") if event["attempt"] == attempt)
        assert (first["version"], first["digest"]) == (step, self.manifests[step]["digest"])

    def go_back_to(self, step: int) -> None:
        """Take away the checkpoints of later steps."""
        for later in self.manifests.keys() - set(range(step + 1)):
            shutil.rmtree(self.folder / f"checkpoints/global_step_{later}")
        (self.folder / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(step))

    def assert_reproduced(self, *arguments: str) -> None:
        """Have `trinity-sync reproduce` repeat the run, and find the same."""
        again = reproduce(self.folder, *arguments)
        assert again.code == 0, again.output
        result = json.loads((again.folder / "reproduction.json").read_text())
        assert result["equal"]
        assert result["versions"] >= len(again.digests)  # and those that were only saved
        assert result["metrics"] >= 10 * len(again.lines("metrics.jsonl"))
        assert again.digests == {step: self.digests[step] for step in again.digests}

    def assert_what_is_saved_is_what_was_published(self, last: int) -> None:
        kept = {step: manifest["digest"] for step, manifest in self.manifests.items() if step in self.digests}
        assert kept == {step: self.digests[step] for step in kept}
        tracker = self.folder / "checkpoints/latest_checkpointed_iteration.txt"
        assert (tracker.read_text().strip(), last in kept) == (str(last), True)
        place = self.folder / f"checkpoints/global_step_{last}"
        exported = export_checkpoint(place, self.folder.with_name(f"{self.folder.name}-exported-{last}"))
        assert exported.digest == exported.checked == self.digests[last]


@dataclass
class Started:
    """A run that is under way."""

    folder: Path
    process: subprocess.Popen[str]
    _seen: list[str] = field(default_factory=list)

    def wait_for_line(self, text: str, limit_s: float = LIMIT_S) -> None:
        """Block until the run prints a line with this text."""
        timer = threading.Timer(limit_s, self.process.kill)
        timer.start()
        try:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self._seen.append(line)
                if text in line:
                    return
        finally:
            timer.cancel()
        raise AssertionError(f"the run ended without printing {text!r}:\n{''.join(self._seen)}")

    def wait_for_file(self, path: str, limit_s: float = LIMIT_S) -> None:
        """Block until the run has written this file, a path in its folder."""
        ends = time.monotonic() + limit_s
        while not (self.folder / path).exists():
            assert self.process.poll() is None, f"the run ended without writing {path}"
            assert time.monotonic() < ends, f"the run did not write {path} in {limit_s} s"
            time.sleep(0.005)

    def wait_for_event(self, wanted: Callable[[dict[str, Any]], bool], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Block until the run has told such an event, and return it."""
        ends = time.monotonic() + limit_s
        while True:
            found = next(filter(wanted, json_lines.read(self.folder / "events.jsonl")), None)
            if found is not None:
                return found
            assert self.process.poll() is None, "the run ended without telling it"
            assert time.monotonic() < ends, f"the run did not tell it in {limit_s} s"
            time.sleep(0.005)

    def finish(self, limit_s: float = LIMIT_S) -> Run:
        rest, _ = self.process.communicate(timeout=limit_s)
        return Run(self.folder, self.process.returncode, "".join(self._seen) + rest)

    def pid_of(self, name: str) -> int:
        """Process id of the actor that logs to logs/<name>.log."""
        log = str(self.folder / "logs" / f"{name}.log")
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if str((entry / "fd" / "1").readlink()) == log:
                    return int(entry.name)
            except OSError:
                continue
        raise AssertionError(f"no process logs to {log}")


def start(folder: Path, *overrides: str, small: bool = True, command: list[str] | None = None) -> Started:
    """Start `launch.py` (or another command) with overrides."""
    program = command or [str(ROOT / "launch.py")]
    arguments = [*(SMALL if small else ["live=line"]), *overrides, f"hydra.run.dir={folder}"]
    process = subprocess.Popen(
        [sys.executable, *program, *(arguments if command is None else overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        start_new_session=True,
    )
    return Started(folder, process)


def launch(folder: Path, *overrides: str, small: bool = True) -> Run:
    """Run `launch.py` to its end."""
    return start(folder, *overrides, small=small).finish()


def completed(*overrides: str) -> Callable[[pytest.TempPathFactory], Run]:
    """A fixture of a module: a run of `launch.py` that came to its end."""

    @pytest.fixture(scope="module")
    def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
        done = launch(tmp_path_factory.mktemp("reference") / "run", *overrides)
        assert done.code == 0, done.output
        return done

    return run


def resume(folder: Path, *overrides: str) -> Run:
    """Run `trinity-sync resume` to its end."""
    return start(folder, "resume", str(folder), *overrides, command=["-m", "trinity_sync.cli"]).finish()


def reproduce(folder: Path, *arguments: str) -> Run:
    """Run `trinity-sync reproduce` to its end; what is returned is the repetition."""
    again = folder.with_name(f"{folder.name}-again")
    command = ["reproduce", str(folder), *arguments, f"hydra.run.dir={again}"]
    return start(again, *command, command=["-m", "trinity_sync.cli"]).finish()


_PROGRAM = """
import json, sys
from trinity_sync.cli.main import main
from trinity_sync.launch.local_ray import ray_kept
with ray_kept():
    codes = [main(command) for command in json.loads(sys.argv[1])]
print(*codes)
"""

Commands = Sequence[tuple[Path, Sequence[str]]]
"""Commands of `trinity-sync`, each with the folder of its run; those that begin a run begin it there."""


def start_in_one_program(commands: Commands) -> Started:
    """Begin commands that run one after the other, with one Ray, as the jobs of a sweep have: where a second start of
    Ray and of all its processes would test nothing new. The folder of what is returned is that of the last one.
    """
    given = [[*words, *([f"hydra.run.dir={folder}"] if words[0] == "run" else [])] for folder, words in commands]
    return start(commands[-1][0], json.dumps(given), command=["-c", _PROGRAM])


def ends_of(started: Started, commands: Commands) -> list[Run]:
    """What came of each of the commands that run in one program; the output is that of all."""
    output = started.finish(2 * LIMIT_S).output
    codes = output.splitlines()[-1].split()
    assert len(codes) == len(commands), output
    return [Run(folder, int(code), output) for (folder, _), code in zip(commands, codes, strict=True)]


def kill_at(started: Started, text: str, victim: Callable[[Started], int], signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process of the run once the run has printed a line with this text."""
    started.wait_for_line(text)
    os.kill(victim(started), signum)
