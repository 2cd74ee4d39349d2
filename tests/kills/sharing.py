"""Programs that use a place of a chain's run: another run, the resume of one, a command, a second user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from tests.e2e.runs import ROOT
from tests.kills import checks, plan
from tests.kills.places import DISK, SECOND_PLACE, Places, contents
from tests.kills.plan import Setup
from tests.kills.processes import MARK, own_mark
from tests.kills.running import SMALL, Launch
from tests.kills.trial import LABEL, LEFT, TAKEN
from trinity_sync.checkpoint.folder import catalog, owner
from trinity_sync.tracking import json_lines

SECOND_UID = 4242
"""Of a second user, who owns nothing else on the host. May read the interpreter, wherever it lies."""

# A refusal takes seconds. A server that is in use is noticed by the explorer, after the start of Ray.
_REFUSED_S = 150.0
_RUN_S = 600.0
_ANOTHER = [*SMALL, "backend=fsdp", "backend.ranks=1", "seed=31"]
_MANY = ("checkpoint.interval=1", "retention=[keep_all]")
"""More checkpoints than the retention of a chain keeps, so that a prune in the wrong place deletes some."""
_CANARY = "import pathlib\npathlib.Path(r'{}').touch()\n"
_OPTIONAL_MODULES = ("habana_frameworks", "torch_npu", "sitecustomize", "usercustomize")
"""Modules that torch, ray or the interpreter import where they are found."""


@dataclass(frozen=True)
class Stranger:
    """Another run, which has ended, with checkpoints in its folder and a mirror of them.

    Attributes:
        digests: version digests of everything that it has published.
    """

    home: Path
    digests: frozenset[str]

    @classmethod
    def make(cls, home: Path, stop: threading.Event) -> Stranger:
        """Run it, where that has not been done before.

        Raises:
            RuntimeError: the run failed.
        """
        if not (home / "run" / "summary.json").exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            run = home / "run"
            command = [str(ROOT / "launch.py"), *_ANOTHER, "trainer.steps=6", f"hydra.run.dir={run}", *_MANY]
            with Launch(
                [*command, f"checkpoint.mirror={home / 'mirror'}"],
                mark=own_mark("stranger"),
                output=home / "output.txt",
                run=run,
                checkpoints=run / "checkpoints",
                stop=stop,
            ) as launch:
                launch.wait_end(_RUN_S)
            if launch.code != 0:
                raise RuntimeError(
                    f"the other run ended with {launch.code}: {checks.error_of(launch.text)}; see {home}"
                )
        events = json_lines.read(home / "run" / "events.jsonl")
        return cls(home, frozenset(event["digest"] for event in events if event["event"] == "publish"))

    def copy(self, to: Path) -> Path:
        """Copy the run's folder and its mirror into a folder; return the copy of the run's folder."""
        shutil.copytree(self.home / "run", to / "run", symlinks=True)
        shutil.copytree(self.home / "mirror", to / "mirror", symlinks=True)
        return to / "run"


class SharedServer:
    """The vLLM server of a campaign: started for the first chain that uses it, and used by one chain at a time."""

    def __init__(self, home: Path) -> None:
        self._home, self._lock = home, threading.Lock()
        self._url = ""
        self._close: Callable[[], None] = lambda: None

    @contextmanager
    def held(self) -> Iterator[list[str]]:
        """Overrides for a run that uses the server; other chains wait meanwhile."""
        with self._lock:
            if not self._url:
                self._start()
            yield ["explorer=vllm_server", f"explorer.url={self._url}", f"model.path={self._home / 'model'}"]

    def close(self) -> None:
        """Kill the server."""
        self._close()

    def _start(self) -> None:
        from tests.explorer.helpers import ARCHITECTURE
        from tests.vllm.servers import PLUG_IN, RealServer
        from trinity_sync.models.architecture import make_model

        shutil.rmtree(self._home, ignore_errors=True)
        self._home.mkdir(parents=True)
        model = make_model(ARCHITECTURE, 7, self._home / "model")
        server = RealServer(model, self._home / "server.log", *PLUG_IN, environment={MARK: own_mark("server")})
        self._close = server.close
        server.start()
        self._url = server.url


class Visits:
    """Lets other programs use the places of a chain's run, and looks at what becomes of them.

    Attributes:
        said: the error of the last one.

    Args:
        places, setup, overrides: of the chain's run; the overrides name its server, where it has one.
        stop: ends every wait.
    """

    def __init__(
        self, places: Places, setup: Setup, stranger: Stranger, overrides: Sequence[str], stop: threading.Event
    ) -> None:
        self._places, self._setup, self._stranger, self._overrides = places, setup, stranger, overrides
        self._stop = stop
        self._count = 0
        self.said = ""
        self.elsewhere: dict[str, str] = {}
        self._host: Launch | None = None
        self._known: dict[str, str] = {}
        if setup.by_environment:
            folder = places.home / "elsewhere"
            run = stranger.copy(folder)
            self.elsewhere = {DISK: str(run / "checkpoints"), SECOND_PLACE: str(folder / "mirror")}
            self._known = contents(folder)

    def possible(self, name: str, *, alone: bool = False) -> str:
        """Return the visit, or another one where this run lacks the place, or has died (`alone`) before it saved
        anything there, so that the place is free; or this user is not root.
        """
        places = [self._places.checkpoints, *([self._places.mirror] if self._setup.mirrored else [])]
        if alone and name in plan.WHILE_IT_RUNS and name != plan.FOLDER and not all(map(checks.whole_in, places)):
            return plan.EDITED
        if name in (plan.MIRROR, plan.FOREIGN_MIRROR, plan.VERL_MIRROR) and not self._setup.mirrored:
            return plan.CHECKPOINTS
        if name == plan.SECOND_USER and os.geteuid() != 0:
            return plan.EDITED
        return plan.EDITED if name == plan.ENVIRONMENT and not self._setup.by_environment else name

    def visit(self, name: str, draw: float, host: Launch | None = None) -> list[str]:
        """Let a program come; the promises that were not kept.

        Args:
            name: see `plan.BETWEEN_LIVES`.
            draw: 0 to 1, which variant.
            host: the run; None: it does not live, so that nothing in its places may change.
        """
        alone, self._host = host is None, host
        self._count += 1
        self.said = ""
        home = self._places.home / f"visit-{self._count}"
        home.mkdir()
        kinds: dict[str, Callable[[Path, float], list[str]]] = {
            plan.CHECKPOINTS: lambda home, _: self._another(home, f"checkpoint.dir={self._places.checkpoints}"),
            plan.MIRROR: lambda home, _: self._another(home, f"checkpoint.mirror={self._places.mirror}"),
            plan.FOLDER: lambda home, _: self._another(home, f"hydra.run.dir={self._places.run}"),
            plan.RESUMED_HERE: self._resume_of_another,
            plan.SERVER: lambda home, _: self._another(home, *self._overrides, codes=(1, 2)),
            plan.FOREIGN_MIRROR: self._other_mirror,
            plan.VERL_MIRROR: self._other_mirror_of_verl,
            plan.EDITED: self._edited,
            plan.SECOND_USER: self._second_user,
            plan.ENVIRONMENT: self._commands,
            plan.AT_ONCE: self._at_once,
            plan.SWEEP: self._sweep,
        }
        before = self._own_places() if alone else {}
        problems = kinds[name](home, draw)
        if alone and name != plan.ENVIRONMENT and (changed := _difference(before, self._own_places())):
            problems.append(f"{TAKEN}: the visit changed {changed}")
        problems += self.elsewhere_problems()
        if not problems:
            shutil.rmtree(home)
        return problems

    def elsewhere_problems(self) -> list[str]:
        """What was changed in the places to which the environment variables lead now: they are another run's."""
        if not self.elsewhere:
            return []
        changed = _difference(self._known, contents(self._places.home / "elsewhere"))
        return [f"{TAKEN}: in the places that the environment variables name now, {changed}"] if changed else []

    def _own_places(self) -> dict[str, str]:
        places = self._places
        records = {".hydra": contents(places.run / ".hydra")}
        paths = [places.run / name for name in ("run.json", "events.jsonl", "metrics.jsonl")]
        files = {path.name: path.read_text() for path in paths if path.exists()}
        found = {"checkpoints": contents(places.checkpoints), "mirror": contents(places.mirror), **records}
        for all_ in found.values():
            all_.pop(owner.MARK, None)  # each start of the run puts its mark there, also a resume that is refused then
        return files | {f"{place}/{name}": digest for place, all_ in found.items() for name, digest in all_.items()}

    # -- those that have to be refused

    def _another(self, home: Path, *overrides: str, codes: Sequence[int] = (2,)) -> list[str]:
        command = [str(ROOT / "launch.py"), *self._of_another(home), "trainer.steps=2", *overrides]
        return self.refused(home, command, overrides[-1 if len(codes) == 1 else 1].partition("=")[2], codes=codes)

    def _of_another(self, home: Path) -> list[str]:
        shm, ray = self._places.shm, self._places.ray
        return [*_ANOTHER, f"hydra.run.dir={home / 'run'}", f"sync.shm_dir={shm}", f"cluster.temp_dir={ray}"]

    def _resume_of_another(self, home: Path, draw: float) -> list[str]:
        run = self._stranger.copy(home)
        into_mirror = draw < 0.7 and self._setup.mirrored
        place = self._places.mirror if into_mirror else self._places.checkpoints
        # A copy has the first run's mirror in its settings, which it would be refused.
        given = [f"checkpoint.mirror={place}"] if into_mirror else [f"checkpoint.dir={place}", "checkpoint.mirror=null"]
        problems = self.refused(home, [*_RESUME, str(run), *given, _MORE], str(place))
        return problems + list(checks.Owner().look(run, [run / "checkpoints"], {}))

    def _other_mirror(self, home: Path, _: float) -> list[str]:
        return self._mirror_instead(home, self._stranger.copy(home).parent / "mirror")

    def _other_mirror_of_verl(self, home: Path, _: float) -> list[str]:
        mirror = self._stranger.copy(home).parent / "mirror"
        for path in [*mirror.glob("*/manifest.json"), *(path for path in mirror.glob(".*") if path.is_file())]:
            path.unlink()
        return self._mirror_instead(home, mirror)

    def _mirror_instead(self, home: Path, other: Path) -> list[str]:
        """A resume finds another folder in the place of its mirror."""
        mirror, aside = self._places.mirror, self._places.home / "mirror-aside"
        known, was_there = contents(other), mirror.exists()
        if was_there:
            mirror.rename(aside)
        other.rename(mirror)
        try:
            problems = self.refused(home, [*_RESUME, str(self._places.run), _MORE], str(mirror))
            if changed := _difference(known, contents(mirror)):
                problems.append(f"{TAKEN}: in a mirror without a mark of the run, the resume changed {changed}")
        finally:
            mirror.rename(home / "mirror-afterwards")
            if was_there:
                aside.rename(mirror)
        return problems

    def _edited(self, home: Path, draw: float) -> list[str]:
        """A copy of the run's folder whose owner, another user, has changed what it names."""
        other = self._stranger.copy(home / "other")
        known = contents(home / "other")
        run, canary = self._folder_of_second_user(home), home / "canary"
        if draw < 0.4:
            modules = home / "modules"
            modules.mkdir()
            for name in _OPTIONAL_MODULES:
                (modules / f"{name}.py").write_text(_CANARY.format(canary))
            _edit(run / ".hydra" / "hydra.yaml", "hydra.runtime.cwd", str(modules))
        elif draw < 0.7:
            _edit(run / ".hydra" / "config.yaml", "checkpoint.mirror", str(other.parent / "mirror"))
        else:
            _edit(run / ".hydra" / "config.yaml", "checkpoint.dir", str(other / "checkpoints"))
        problems = self.refused(home, [*_RESUME, str(run), _MORE], "")
        if canary.exists():
            problems.append(f"{TAKEN}: the resume ran a module of the folder's owner")
        if changed := _difference(known, contents(home / "other")):
            problems.append(f"{TAKEN}: in the place that the edited folder names, the resume changed {changed}")
        return problems

    def _second_user(self, home: Path, draw: float) -> list[str]:
        """Another user resumes a copy of the run's folder, or starts a run with its places."""
        run = self._folder_of_second_user(home)
        caps = "+dac_read_search"
        before = ["setpriv", f"--reuid={SECOND_UID}", f"--regid={SECOND_UID}", "--clear-groups"]
        before += [f"--inh-caps={caps}", f"--ambient-caps={caps}"]
        user_home = str(run.parent)
        command = [*_RESUME, str(run), _MORE]
        if draw < 0.3:
            command = [str(ROOT / "launch.py"), *_ANOTHER, f"hydra.run.dir={run.parent / 'new'}", "trainer.steps=2"]
            command += [f"checkpoint.dir={self._places.checkpoints}"]
        environment = {"HOME": user_home, "XDG_STATE_HOME": f"{user_home}/state"}
        return self.refused(home, command, "", environment=environment, before=before)

    def _folder_of_second_user(self, home: Path) -> Path:
        """A copy of the run's folder, without checkpoints that lie in it, which another user owns."""
        run = home / "of-second-user" / "run"
        shutil.copytree(self._places.run, run, symlinks=True, ignore=shutil.ignore_patterns("checkpoints", ".lock"))
        if os.geteuid() == 0:
            for path in (run.parent, *run.parent.rglob("*")):
                os.lchown(path, SECOND_UID, SECOND_UID)
        return run

    def _sweep(self, home: Path, draw: float) -> list[str]:
        key = "checkpoint.mirror" if draw < 0.5 else "checkpoint.dir"
        command = [str(ROOT / "launch.py"), "-m", *_ANOTHER, "hydra/launcher=parallel", "seed=1,2", "trainer.steps=2"]
        command += [f"hydra.sweep.dir={home / 'sweep'}", f"{key}={home / 'shared'}"]
        problems = self.refused(home, command, key)
        if (home / "shared").exists() and list((home / "shared").rglob("*")):
            problems.append(f"{LEFT}: the sweep that was refused wrote to {home / 'shared'}")
        return problems

    def refused(
        self,
        home: Path,
        command: Sequence[str],
        named: str,
        *,
        codes: Sequence[int] = (2,),
        environment: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> list[str]:
        """Start a program that has to end with one of these codes and an error that names a key or path."""
        mark = own_mark(f"visit-{threading.get_ident()}")
        with self._start(home, command, mark, environment, before) as launch:
            deadline = time.monotonic() + _REFUSED_S
            while launch.code is None and launch.is_starting and time.monotonic() < deadline:
                launch.wait_end(0.2)
                if self._host is not None and self._host.code is not None and 1 in codes:  # its server is free now
                    os.kill(launch.pid, signal.SIGTERM)
                    return [] if launch.wait_end(_REFUSED_S) else [f"{LEFT}: a visitor that SIGTERM did not end"]
            code, text, self.said = launch.code, launch.text, checks.error_of(launch.text)
        if code not in codes:
            how = f"ended with {code}" if code is not None else "was not refused, and was killed"
            return [f"{TAKEN}: the visitor {how}: {self.said or text[-300:]}"]
        if not self.said or named not in self.said or "Traceback" in text:
            return [f"the refusal does not name {named}, or has a traceback: {self.said or text[-300:]}"]
        return []

    def _start(
        self,
        home: Path,
        command: Sequence[str],
        mark: str,
        environment: dict[str, str] | None = None,
        before: Sequence[str] = (),
        name: str = "output.txt",
    ) -> Launch:
        return Launch(
            list(command),
            mark=mark,
            output=home / name,
            run=home / "run",
            checkpoints=home / "run" / "checkpoints",
            stop=self._stop,
            environment={**self.elsewhere, **(environment or {})},
            before=before,
        )

    # -- others

    def _commands(self, home: Path, _: float) -> list[str]:
        """Commands on the run while the environment variables in its settings have other values."""
        problems = []
        own = sorted(info.step for info in catalog.scan(self._places.checkpoints))
        for command in (["ckpt", "prune"], ["ckpt", "list", "--json"]):
            done = subprocess.run(
                [sys.executable, "-m", "trinity_sync.cli", *command, str(self._places.run)],
                capture_output=True,
                text=True,
                cwd=home,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.elsewhere},
            )
            self.said = self.said or checks.error_of(done.stderr)
            if done.returncode != (0 if own else 2):
                problems.append(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-300:]}")
        listed = sorted({int(one["step"]) for one in _objects(done.stdout) if "step" in one})
        if not problems and listed != own:
            problems.append(f"{LABEL}: ckpt list shows the steps {listed}, the run has {own}")
        return problems

    def _at_once(self, home: Path, draw: float) -> list[str]:
        """Two runs start together with one new mirror or checkpoint folder. One of them may have it."""
        place = home / "shared"
        override = f"checkpoint.{'mirror' if draw < 0.6 else 'dir'}={place}"
        codes: dict[Path, int | None] = {}
        launches = []
        try:
            for index in range(2):
                one = home / str(index)
                one.mkdir()
                command = [str(ROOT / "launch.py"), *self._of_another(one), "trainer.steps=2", override]
                mark = own_mark(f"at-once-{threading.get_ident()}-{index}")
                launches.append(self._start(one, command, mark))
            for index, launch in enumerate(launches):
                launch.wait_end(_RUN_S)
                codes[home / str(index) / "run"] = launch.code
                self.said = self.said or checks.error_of(launch.text)
        finally:
            for launch in launches:
                launch.__exit__()
        done = [run for run, code in codes.items() if code == 0]
        if len(done) > 1 or not set(codes.values()) <= {0, 2}:
            return [
                f"{TAKEN}: two runs that started together with {override} ended with {sorted(map(str, codes.values()))}"
            ]
        if not done:
            return []  # each has seen the other
        return list(checks.Owner().look(done[0], [place], {})) + list(checks.mirror_problems(place))


_RESUME = ("-m", "trinity_sync.cli", "resume")
_MORE = "trainer.steps=1000"  # a run that has all its steps is refused for that


def _edit(path: Path, key: str, value: str) -> None:
    cfg = OmegaConf.load(path)
    OmegaConf.update(cfg, key, value, force_add=True)
    path.write_text(OmegaConf.to_yaml(cfg))


def _difference(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names of what is not the same, at most five."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))[:5]


def _objects(text: str) -> list[dict[str, object]]:
    """The JSON objects that `ckpt list --json` prints, as one list or one after the other."""
    try:
        found = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if isinstance(found, dict):
        found = found.get("checkpoints", [found])
    return [one for one in found if isinstance(one, dict)]
