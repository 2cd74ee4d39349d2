"""The Hydra application around a run: exit codes, one-paragraph errors, and sweeps that survive a failing job.
`launch.py` and `trinity-sync run` and `resume` call `run_main` with a Hydra entry; Hydra calls `job` for each composed
configuration. `launch.launcher` is imported only after all checks.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

import hydra._internal.utils as hydra_internals
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config import FORMER_MODULES, Config, RunConfig
from trinity_sync.config.composed_jobs import ComposedJob, composed_before, is_fixed, note_settings, sweep_jobs
from trinity_sync.config.composition import inspected, pattern_files, settle
from trinity_sync.config.messages import DRY_RUN, SUPERVISE, CommandLine, explain, print_error
from trinity_sync.config.saved_config import SETTINGS_FOLDER, Trust, saved_texts
from trinity_sync.errors import ConfigError, RunError, TrinityError
from trinity_sync.host.durable import replace_file
from trinity_sync.host.hardware import own_modules_found
from trinity_sync.host.interrupts import interruptible
from trinity_sync.host.logs import LogFile, log_failure
from trinity_sync.host.masking import hide_typed
from trinity_sync.host.origin import error_text, origin
from trinity_sync.host.process import replaced
from trinity_sync.host.references import Settings, path_list
from trinity_sync.host.terminal import output_lost, safe_streams
from trinity_sync.launch import supervision, sweeps
from trinity_sync.launch.start import Resume, planned_steps, used_places
from trinity_sync.launch.sweeps import sweep_problem
from trinity_sync.tracking.run_record import holds_run, lock_owner, lock_run_folder, unlock_run_folder

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done; the run or a check failed; the configuration or command line is wrong; interrupted."""

_EPOCHS = "trainer.total_epochs"
_MATCHED = "matched_files.json"
_LOOKED_AT = ("workload", "backend", "model", "task", "explorer", "sync", "cluster", "tracker")
"""Parts of a configuration that the slow checks before a start depend on."""


@dataclass
class _MainState:
    """The state of one call of `run_main`, shared by Hydra's calls of `job`."""

    resume: Resume | None = None  # how the one job is resumed; None: it is new
    until: int | None = None  # the step after which it ends; None: its last
    command: list[str] = field(default_factory=lambda: list(sys.argv))  # `sys.argv` as the user gave it
    codes: dict[Path, int] = field(default_factory=dict)  # exit codes by run folder, of the jobs in this process
    sweep: Path | None = None  # folder of the sweep, once its jobs start
    before: Sequence[Path] = ()  # folders of jobs of earlier sweeps in it
    around_jobs: ExitStack = field(default_factory=ExitStack)  # closed at the end of the command
    dry_run: bool = False  # only check whether runs could start
    rerun: bool = False  # by Hydra's ``--experimental-rerun``, from a pickled configuration
    made: NewFolder | None = None  # the folder of the one run; None: unknown yet, or several

    def tidy(self) -> None:
        """Remove the folder of a run that did not start."""
        if self.made is None:
            return
        unlock_run_folder(self.made.path)
        code = self.codes.get(self.made.path)
        if code in (REFUSED, INTERRUPTED) or (self.dry_run and code == DONE):
            self.made.take_back()


_session = _MainState()


@safe_streams()
def run_main(
    main: Callable[[], object],
    arguments: Sequence[str] | None = None,
    *,
    resume: Resume | None = None,
    until: int | None = None,
    typed: bool = True,
) -> int:
    """Run a Hydra entry and return the exit code of the process. `typed`: the arguments are the user's words, not the
    settings of an earlier run. Returns 0: done; 1: the run or a job of the sweep failed; 2: configuration or command
    line wrong (a sweep: of all jobs); 130: interrupted.
    """
    global _session
    _session = _MainState(resume=resume, until=until)
    try:
        line = CommandLine.read(sys.argv[1:] if arguments is None else arguments, typed=typed)
        options, _ = hydra_internals.get_args_parser().parse_known_args(line.arguments)
        _session.dry_run, _session.rerun = line.dry_run, options.experimental_rerun is not None
        if _session.rerun:
            sys.modules.update(dict.fromkeys(FORMER_MODULES, sys.modules[Config.__module__]))
        hide_typed(line.arguments)
        with (
            _supervised(line, options),
            interruptible(),
            own_modules_found(Path.cwd(), unless_named=True),
            replaced(sys, argv=[sys.argv[0], *line.arguments]),
            # Hydra's errors are raised; it would print them and exit with 1
            replaced(hydra_internals, run_and_report=lambda function: function()),
            inspected(composed=settle),
            _session.around_jobs,
        ):
            main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:
        # Hydra exits with 1 on misuse, argparse with 2, --help with 0
        return REFUSED if end.code not in (0, None) else FAILED if output_lost() else DONE
    except Exception as error:
        print_error(explain(error))
        codes = _codes()
        if all(code == REFUSED for code in codes.values()):
            return REFUSED
        if _session.sweep:
            finish_sweep(_session.sweep, codes)
        return FAILED
    finally:
        _session.tidy()
    codes = _codes()
    if not codes and output_lost():  # --help or --cfg
        return FAILED
    return finish_sweep(_session.sweep, codes) if _session.sweep else max(codes.values(), default=DONE)


def _supervised(line: CommandLine, options: Namespace) -> AbstractContextManager[None]:
    """Go on as the child of a supervisor if that is asked for, unless only a text is."""
    if not line.supervised or options.help or options.hydra_help or options.shell_completion:
        return contextlib.nullcontext()
    names = ("multirun", "cfg", "info", "experimental_rerun")
    others = {DRY_RUN: line.dry_run, **{f"--{name.replace('_', '-')}": getattr(options, name) for name in names}}
    return supervision.supervised(resumes=False, others=others)


def _codes() -> dict[Path, int]:
    """Return the jobs' exit codes by folder. Jobs in other processes are judged by their files."""
    if _session.codes or not _session.sweep:
        return _session.codes
    found = sweeps.codes_on_disk(_session.sweep)
    return {folder: code for folder, code in found.items() if folder not in _session.before}


def job(cfg: DictConfig) -> float:
    """Check a composed configuration and run it. Hydra calls it for each job. Errors of a run are printed, not raised,
    since a sweep would stop there; `run_main` returns the exit code.

    Returns:
        The objective for a sweeper: the mean reward of the last steps, NaN if the run did not get that far or was
            refused.

    Raises:
        KeyboardInterrupt: the user interrupts, which stops a sweep too.
        SystemExit: a queue that is out of time will restart the job.
    """
    if _session.rerun:
        _take_free_folder()
        _session.made = NewFolder.of(Path(HydraConfig.get().runtime.output_dir))
    hydra_cfg = HydraConfig.get()
    run_dir = Path(hydra_cfg.runtime.output_dir)
    by_launcher = bool(settle(cfg))  # it was composed in a launcher's process
    where = f"job {hydra_cfg.job.num}: " if hydra_cfg.mode == RunMode.MULTIRUN else ""
    sys.argv = sweeps.command_in_queue(hydra_cfg) or list(_session.command)
    code, log = FAILED, run_dir / "logs" / "driver.log"
    try:
        with sweeps.beside_others(hydra_cfg):
            code = _launch(RunConfig(cfg), run_dir, saved_by_hydra=not by_launcher)
    except TrinityError as error:
        code = error.exit_code
        place = "" if code == REFUSED or origin(error) is None else f" (traceback in {log})"
        print_error(f"{where}{error}{place}")
    except KeyboardInterrupt:  # before the run has a record; a sweep reports it at its end
        code = INTERRUPTED
        if not where:
            print_error("interrupted")
    except (Exception, SystemExit) as error:
        if sweeps.is_of_queue(error):
            raise
        log_failure("the job", error)
        print_error(f"{where}unexpected {error_text(error)} (traceback in {log})")
    finally:
        _session.codes[run_dir] = code
    if code == INTERRUPTED and where:
        raise KeyboardInterrupt
    objective = math.nan if code == REFUSED else _objective(run_dir)
    if where and math.isnan(objective) and sweeps.takes_no_nan(hydra_cfg):
        raise RunError(f"{where}no reward")
    return objective


def _launch(cfg: RunConfig, run_dir: Path, *, saved_by_hydra: bool = True) -> int:
    resume, hydra_cfg = _session.resume, HydraConfig.get()
    places: Mapping[str, object] = {}
    started_in = resume.started_in if resume else Path(hydra_cfg.runtime.cwd)
    used = cfg.anchored(started_in)
    if hydra_cfg.mode == RunMode.MULTIRUN and sweeps.started_again(hydra_cfg, run_dir):
        sweeps.wait_until_free(run_dir)
        if sweeps.has_completed(run_dir):
            return DONE
        resume, places = Resume(started_in=started_in), used_places(run_dir)
        if cfg.select(_EPOCHS) is not None and (steps := planned_steps(run_dir)):  # the file may have grown
            places = {**places, "trainer.steps": steps, _EPOCHS: None}
        with contextlib.suppress(OSError, ValueError):  # there was no pattern
            matched = json.loads((run_dir / SETTINGS_FOLDER / _MATCHED).read_text("utf-8"))
            places = {**places, **{key: matched[key] for key in pattern_files(used.composed) if key in matched}}
    used = used.updated(places)  # as `trinity-sync resume` does, see `config.invocation`
    used = used.updated(pattern_files(used.composed))
    used.check()
    from trinity_sync.launch import healing, launcher

    if (rate := used.rate_text()) is not None:
        print(rate)
    if _session.dry_run:
        launcher.look(used, run_dir)
        print(f"dry run: {used.settings.name} could begin, in {run_dir}; nothing was started")
        return DONE
    saved = saved_by_hydra and resume is None and not _session.rerun
    settings = partial(settings_files, run_dir, cfg, started_in=started_in, saved_by_hydra=saved)
    return healing.run(used, run_dir, started_in=started_in, resume=resume, until=_session.until, settings=settings)


def _objective(run_dir: Path) -> float:
    try:
        return float(json.loads((run_dir / "summary.json").read_text())["reward_last"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.nan


class RunHooks(Callback):
    """Hydra's callback, named in `conf/config.yaml`."""

    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        """Keep Hydra from overwriting the files of an existing run: the launcher refuses the folder, or saves a
        resume's settings after all checks. A folder in use is refused here.
        """
        try:
            folder = Path(config.hydra.run.dir).absolute()
        except OmegaConfBaseException:
            # the folder cannot be resolved: Hydra reports the same error next
            return
        if owner := lock_owner(folder):
            _refuse(f"{folder} is in use by {owner}; stop that run or choose another folder by hydra.run.dir")
        _session.made = NewFolder.of(folder)
        if holds_run(folder) or _session.dry_run:
            with read_write(config.hydra):
                config.hydra.output_subdir = None
        elif _session.resume is None:
            try:
                # before Hydra writes there, so that two runs that start at once do not mix their files
                lock_run_folder(folder)
            except ConfigError as error:
                _refuse(str(error))

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Refuse a sweep that would overwrite a run or has an invalid job, before anything is written."""
        jobs: Sequence[ComposedJob] = ()
        if supervision.driver() is not None:
            _refuse(f"{SUPERVISE} is for one run, and these settings are those of a sweep")
        try:
            jobs = sweep_jobs(config)
            problem = sweep_problem(config.hydra, jobs)
        except (HydraException, AssertionError) as error:
            problem = explain(error)
        except OmegaConfBaseException:
            problem = None  # as above; or it is resolvable only where the job runs
        if problem:
            _refuse(problem)
        if _session.dry_run:
            _try_jobs(jobs)
        elif is_fixed(config.hydra) and sweeps.on_this_machine(config.hydra):
            _look_at(jobs)
        note_settings(config, jobs)
        _session.around_jobs.enter_context(composed_before(config.hydra))
        _session.around_jobs.enter_context(sweeps.jobs_end_first(config.hydra, float(config.checkpoint.stop_s)))
        if sweeps.in_this_process(config.hydra):
            from trinity_sync.launch.local_ray import ray_kept

            _session.around_jobs.enter_context(ray_kept())
        else:
            _session.before = sweeps.job_folders(Path(config.hydra.sweep.dir))
        _session.sweep = Path(config.hydra.sweep.dir)


def _try_jobs(jobs: Sequence[ComposedJob]) -> NoReturn:
    """Do the dry run of a sweep."""
    try:
        for job in jobs:
            with job.begun() as folder:
                _launch(job.settings, folder)
    except TrinityError as error:
        _refuse(str(error))
    raise SystemExit(DONE)


def _look_at(jobs: Sequence[ComposedJob]) -> None:
    """Do the checks before a start for the jobs of a sweep, once where jobs have the same model, data and machine. Each
    job repeats them and prints their notes.
    """
    from trinity_sync.launch import launcher

    seen = set()
    for job in jobs:
        with job.begun() as folder:
            used = job.settings.anchored(job.started_in)
            epochs = used.settings.trainer.total_epochs
            alike = repr([epochs, *(getattr(used.settings, name) for name in _LOOKED_AT)])
            if alike in seen:
                continue
            seen.add(alike)
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    launcher.look(used, folder)
            except TrinityError as error:
                given = " ".join(job.overrides)
                _refuse(f"job {job.number} of the sweep ({given}) cannot run, so nothing was started: {error}")
            except Exception:
                continue  # the job meets it too, and logs its traceback; Hydra would start the jobs without our sweep


def _refuse(problem: str) -> NoReturn:
    """End the program from a Hydra callback; Hydra would turn an error into a warning."""
    print_error(problem)
    raise SystemExit(REFUSED)


def finish_sweep(sweep: Path, codes: Mapping[Path, int]) -> int:
    """Write the report of a sweep, print which jobs failed, and return its exit code. `codes`: by job folder."""
    if all(code == REFUSED for code in codes.values()):
        return REFUSED
    from trinity_sync.report import load, render_table, write_report

    try:
        found = load(sweep)
        page = write_report(found)
        print(f"{render_table(found)}\n{page}")
    except TrinityError as error:
        print_error(f"the sweep has no report: {error}")
    bad = [folder.name for folder, code in codes.items() if code != DONE]
    if not bad:
        return DONE
    print_error(f"{len(bad)} of {len(codes)} jobs did not end well: {', '.join(bad)} in {sweep}")
    return FAILED


class DriverLog(LogFile):
    """The driver's log file, named in `conf/hydra/job_logging`. Created with its first line, so that a refused run
    leaves none. `filename`: path of the file.
    """

    def __init__(self, filename: str) -> None:
        super().__init__(filename)


def _take_free_folder() -> None:
    """Give a rerun a folder without a run: that of the first run, else ``NAME-rerun`` next to it (``-rerun-2``, ...);
    for a job of a sweep, next to the sweep. Hydra calls no callback for a rerun, writes no files, and keeps the pickled
    folder.
    """
    whole = HydraConfig.get()._get_parent()  # type: ignore[attr-defined]
    hydra = whole.hydra
    folder = Path(hydra.runtime.output_dir)
    if hydra.mode == RunMode.MULTIRUN:
        sweep = folder.parents[len(Path(hydra.sweep.subdir).parts) - 1]
        folder = sweep.with_name(f"{sweep.name}-{hydra.job.num}")
    tried = folder
    for number in count(1):
        if not holds_run(tried):
            break
        tried = folder.with_name(f"{folder.name}-rerun{f'-{number}' if number > 1 else ''}")
    with read_write(hydra), open_dict(hydra):
        hydra.mode = RunMode.RUN
        hydra.run.dir = hydra.runtime.output_dir = str(tried)
    HydraConfig.instance().set_config(whole)
    configure_log(hydra.job_logging, hydra.verbose)


# -- the folder of a run, which Hydra makes before the settings are checked


@dataclass(frozen=True)
class NewFolder:
    """A folder that is about to be made."""

    path: Path  # absolute
    first: Path | None  # the topmost missing folder of its path; None: the folder exists

    @classmethod
    def of(cls, path: Path) -> NewFolder:
        """Note which folders of a path are missing."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        return cls(path, missing[-1] if missing else None)

    def take_back(self) -> None:
        """Remove the folder and its new parents if no run has started there, with the files of a refused run."""
        try:
            if self.first is None or not self.path.is_dir() or holds_run(self.path):
                return
            unlock_run_folder(self.path)
            lock_run_folder(self.path)
        except ConfigError:
            return  # in use
        for name in (".hydra", "logs"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / ".lock").unlink(missing_ok=True)
        unlock_run_folder(self.path)
        with contextlib.suppress(OSError):  # it has other files
            self.path.rmdir()
            for folder in self.path.parents:
                if folder.is_relative_to(self.first):
                    folder.rmdir()


# -- the saved settings of a run and this user's record, in `.hydra/`


@contextmanager
def settings_files(
    run: Path, cfg: RunConfig, used: RunConfig, *, started_in: Path, saved_by_hydra: bool
) -> Iterator[None]:
    """Save what a resume needs: of a new run the record, of a resumed run also the settings. If the launcher refuses
    the run, the earlier settings are restored.
    """
    folder = run / SETTINGS_FOLDER
    trust = Trust(where=run, started_in=started_in)
    unsaved = saved_by_hydra and not folder.is_dir()  # hydra.output_subdir=null
    patterns = pattern_files(cfg.anchored(started_in).composed)
    made: Settings = {key: [*path_list(used.select(key))] for key in patterns}
    matched = {_MATCHED: json.dumps(made)} if made else {}
    if cfg.select(_EPOCHS) is not None:
        made |= {"trainer.steps": used.settings.trainer.steps, _EPOCHS: None}
    if made:
        cfg, saved_by_hydra = cfg.updated(made), False
    texts: Mapping[str, str] = {}
    if not unsaved:
        texts = saved_texts(cfg.composed, used.composed, trust, saved_by_hydra=saved_by_hydra, made=made) | matched
    before = {name: path.read_text("utf-8") if (path := folder / name).exists() else None for name in texts}
    _write(folder, texts)
    try:
        yield
    except ConfigError:
        if not saved_by_hydra:
            _write(folder, before)
        raise


def _write(folder: Path, texts: Mapping[str, str | None]) -> None:
    for name, text in texts.items():
        try:
            if text is not None:
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(folder / name, text)
            else:
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{folder / name} cannot be written: {error.strerror or error}") from error
