"""The Hydra application around a run: exit codes, one-paragraph errors, and sweeps that outlive a failing job.

`launch.py` and `trinity-sync run` and `resume` put their Hydra entry through `run_main`, and Hydra calls `job` with
each composed configuration. Only when that has passed all checks is `trinity_sync.launch.launcher` imported.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import hydra._internal.utils as hydra_internals
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_sync import config
from trinity_sync.errors import RunError, TrinityError
from trinity_sync.host.logs import LogFile, log_failure
from trinity_sync.host.origin import origin, told
from trinity_sync.launch import elsewhere
from trinity_sync.launch.resume import Resume
from trinity_sync.launch.settings import changed_settings
from trinity_sync.launch.sweeps import composed_before, note_settings, sweep_problem
from trinity_sync.tracking.run_folder import holds_run, lock_owner

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done; the run or a check failed; configuration or command line wrong; interrupted."""


@dataclass
class _Session:
    """What one call of `run_main` remembers between Hydra's calls of `job`.

    Attributes:
        resume: how the one job goes on with the run in its folder; None: it is a new one.
        until: the step after which it ends; None: its last.
        command: `sys.argv` as the user gave it.
        codes: run folder to exit code, of the jobs that ran in this process.
        sweep: folder of the sweep, once its jobs begin.
        before: folders of jobs of earlier sweeps in it.
        around_jobs: left when the command is over.
    """

    resume: Resume | None = None
    until: int | None = None
    command: list[str] = field(default_factory=lambda: list(sys.argv))
    codes: dict[Path, int] = field(default_factory=dict)
    sweep: Path | None = None
    before: Sequence[Path] = ()
    around_jobs: ExitStack = field(default_factory=ExitStack)


_session = _Session()


def run_main(
    main: Callable[[], Any],
    arguments: Sequence[str] | None = None,
    *,
    resume: Resume | None = None,
    until: int | None = None,
) -> int:
    """Run a Hydra entry and return the exit code of the process.

    Args:
        main: a function decorated by `hydra.main` whose body returns `job(cfg)`.
        arguments: what Hydra is to see as the command line, without the program; None for `sys.argv`.
        resume: how the run in `hydra.run.dir` goes on; None: a new one is started.
        until: the step after which it ends; None: `trainer.steps`.

    Returns:
        0 done; 1 the run failed, or a job of the sweep; 2 configuration or command line wrong (a sweep: of all jobs);
        130 interrupted.
    """
    global _session
    _session = _Session(resume=resume, until=until)
    config.make_quick()
    try:
        with _command_line(arguments), _hydra_errors_raised(), _session.around_jobs:
            main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return reader_gone()
    except SystemExit as end:
        # Hydra ends with 1 where it is misused, argparse with 2, --help with 0
        return DONE if end.code in (0, None) else REFUSED
    except Exception as error:
        print_error(explain(error))
        codes = _codes()
        if all(code == REFUSED for code in codes.values()):
            return REFUSED
        if _session.sweep:
            finish_sweep(_session.sweep, codes)
        return FAILED
    codes = _codes()
    return finish_sweep(_session.sweep, codes) if _session.sweep else max(codes.values(), default=DONE)


def _codes() -> dict[Path, int]:
    """Exit codes of the jobs, by folder. Those that a launcher ran in other processes are judged by their files."""
    if _session.codes or not _session.sweep:
        return _session.codes
    found = elsewhere.codes_on_disk(_session.sweep)
    return {folder: code for folder, code in found.items() if folder not in _session.before}


def job(cfg: DictConfig) -> float:
    """Check a composed configuration and run it. Called by Hydra, once for each job; never raises for a failing run.

    Returns:
        The objective for a sweeper that looks for the best settings: the mean reward of the last steps, NaN where the
        run did not get so far, or was refused. The exit code goes to `run_main`, since a sweep would end at a job that
        raises.

    Raises:
        KeyboardInterrupt: the user wants to stop, so that a sweep stops too.
        SystemExit: a queue that has told that time is up will start the job again.
        RunError: the objective would be NaN, which Optuna takes from nobody.
    """
    hydra_cfg = HydraConfig.get()
    run_dir = Path(hydra_cfg.runtime.output_dir)
    where = f"job {hydra_cfg.job.num}: " if hydra_cfg.mode == RunMode.MULTIRUN else ""
    sys.argv = elsewhere.command_in_queue(hydra_cfg) or list(_session.command)
    code = FAILED
    try:
        with elsewhere.beside_others(hydra_cfg):
            code = _launch(cfg, run_dir)
    except TrinityError as error:
        code = error.exit_code
        log = "" if code == REFUSED or origin(error) is None else f" (traceback in {_log_of(run_dir)})"
        print_error(f"{where}{error}{log}")
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (Exception, SystemExit) as error:
        if elsewhere.is_of_queue(error):
            raise
        log_failure("the job", error)
        print_error(f"{where}unexpected {told(error)} (traceback in {_log_of(run_dir)})")
    finally:
        _session.codes[run_dir] = code
    if code == INTERRUPTED and where:
        raise KeyboardInterrupt
    objective = math.nan if code == REFUSED else _objective(run_dir)
    if where and math.isnan(objective) and elsewhere.takes_no_nan(hydra_cfg):
        raise RunError(f"{where}no reward")
    return objective


def _log_of(run_dir: Path) -> Path:
    return run_dir / "logs" / "driver.log"


def _launch(cfg: DictConfig, run_dir: Path) -> int:
    resume, hydra_cfg = _session.resume, HydraConfig.get()
    started_in = resume.started_in if resume else Path(hydra_cfg.runtime.cwd)
    if hydra_cfg.mode == RunMode.MULTIRUN and elsewhere.started_again(hydra_cfg, run_dir):
        elsewhere.wait_until_free(run_dir)
        if elsewhere.has_completed(run_dir):
            return DONE
        resume = Resume(started_in=started_in)
    used = config.anchored(cfg, started_in)
    config.check(used)
    config.check_inputs(used)
    from trinity_sync.launch import launcher

    settings = changed_settings(run_dir, cfg, started_in) if resume else None
    return launcher.run(used, run_dir, resume=resume, until=_session.until, settings=settings)


def _objective(run_dir: Path) -> float:
    try:
        return float(json.loads((run_dir / "summary.json").read_text())["reward_last"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.nan


class RunHooks(Callback):
    """Hydra's callback, named in `conf/config.yaml`."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep Hydra from writing its files over those of a run that is there: the launcher refuses the folder, or
        saves the settings of a resume once nothing speaks against it. A folder in use is refused here.
        """
        try:
            folder = Path(config.hydra.run.dir).absolute()
        except OmegaConfBaseException:
            # a folder that cannot be named: Hydra meets the same error in a moment, and it is reported then
            return
        if owner := lock_owner(folder):
            _refuse(f"{folder} is in use by {owner}; stop that run or choose another folder by hydra.run.dir")
        if holds_run(folder):
            OmegaConf.set_readonly(config.hydra, False)
            config.hydra.output_subdir = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a sweep that would write over a run, or has a job that cannot run, before anything is written."""
        try:
            problem = sweep_problem(config)
        except (HydraException, AssertionError) as error:
            problem = explain(error)
        except OmegaConfBaseException:
            problem = None  # as above; or it can be named only where the job will run
        if problem:
            _refuse(problem)
        note_settings(config)
        _session.around_jobs.enter_context(composed_before(config.hydra))
        _session.around_jobs.enter_context(elsewhere.jobs_end_first(config.hydra))
        if elsewhere.in_this_process(config.hydra):
            from trinity_sync.launch.own_ray import ray_kept

            _session.around_jobs.enter_context(ray_kept())
        else:
            _session.before = elsewhere.job_folders(Path(config.hydra.sweep.dir))
        _session.sweep = Path(config.hydra.sweep.dir)


def _refuse(problem: str) -> NoReturn:
    """End the program from a callback of Hydra's, which would warn of an error and go on."""
    print_error(problem)
    raise SystemExit(REFUSED)


def finish_sweep(sweep: Path, codes: Mapping[Path, int]) -> int:
    """Write the report of a sweep, say which jobs did not end well, and make one exit code of theirs.

    Args:
        codes: exit code by the folder of the job.
    """
    if all(code == REFUSED for code in codes.values()):
        return REFUSED
    _report_sweep(sweep)
    bad = [folder.name for folder, code in codes.items() if code != DONE]
    if not bad:
        return DONE
    print_error(f"{len(bad)} of {len(codes)} jobs did not end well: {', '.join(bad)} in {sweep}")
    return FAILED


def _report_sweep(sweep: Path) -> None:
    from trinity_sync.report import load, render_table, write_report

    try:
        found = load(sweep)
        page = write_report(found)
        print(render_table(found))
        print(page)
    except TrinityError as error:
        print_error(f"the sweep has no report: {error}")


class DriverLog(LogFile):
    """The driver's log, named in `conf/hydra/job_logging`. Made with its first line, so that a refused run leaves none.

    Args:
        filename: path of the file.
    """

    def __init__(self, filename: str) -> None:
        super().__init__(filename)


@contextmanager
def _command_line(arguments: Sequence[str] | None) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *(before[1:] if arguments is None else arguments)]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _hydra_errors_raised() -> Iterator[None]:
    """Have Hydra raise its errors. Otherwise it prints them its own way and ends the process with 1.

    `HYDRA_FULL_ERROR` would do so too, but in every process that a job starts as well.
    """
    before = hydra_internals.run_and_report
    hydra_internals.run_and_report = lambda func: func()
    try:
        yield
    finally:
        hydra_internals.run_and_report = before


# --------------------------------------------------------------------------------------------------------------------
# Errors in one paragraph
# --------------------------------------------------------------------------------------------------------------------


def print_error(text: str) -> None:
    """Print an error as one paragraph on stderr, after the traceback of the current exception if that is wanted."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1" and sys.exc_info()[0] is not None:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr, flush=True)


def reader_gone() -> int:
    """Fall silent where whoever read the output has left, as `head` does; return the exit code for it."""
    # Python flushes stdout once more at its end, which would fail again and be reported
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


_KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def explain(error: Exception) -> str:
    """Say in one paragraph why Hydra could not compose a configuration: which file and key, and what would be right."""
    if isinstance(error, TrinityError):
        return str(error)
    cause = error.__cause__
    text = f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error)
    file = re.match(r"In '([^']+)'", text)
    where = f"{file[1]}.yaml: " if file and file[1] != "config" else ""
    named = re.search(r"full_key: (\S+)", text)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return where + _explain_missing_option(error)
    if isinstance(error, OverrideParseException):
        told = " ".join(line for line in text.splitlines()[:2] if not line.startswith("See http"))
        told = told if error.override in told else f"Error parsing override '{error.override}' {told}"
        return f"{told}; write key=value, and quote a value with special characters: key='a,b'"
    if named and re.search(r"Key '[^']*' (?:is )?not in", text):
        return where + _explain_unknown_key(named[1], text, cause)
    if named and "is not Optional" in text:
        return f"{where}{named[1]} is null; it needs a value"
    if named and (
        wrong := re.search(r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)", text)
    ):
        return f"{where}{named[1]} is {wrong[1] or 'empty'}; must be {_KINDS.get(wrong[2], wrong[2])}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; choose a folder that can be written, hydra.run.dir=..."
    if isinstance(error, AssertionError) and (below := _below_null(error)):
        return f"{below[0]} cannot be set: {below[1]} is null; give all of it, {below[1]}={{...}}, or leave it out"
    lines = [line.strip() for line in text.split("Config search path:")[0].splitlines()]
    told = " ".join(line for line in lines if line and not line.startswith(("reference_type=", "object_type=")))
    if "Config group override must be" in told:
        return "a group cannot be null; choose one of its options, group=option, or for a list of options group=[]"
    return told if isinstance(error, HydraException | OmegaConfBaseException) else f"{told} ({type(error).__name__})"


def _below_null(error: AssertionError) -> tuple[str, str] | None:
    """The key that was to be set, and the one above it that is null. OmegaConf has no error of its own for that."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is OmegaConf.update.__code__:
            key, cfg = frame.f_locals["key"], frame.f_locals["cfg"]
            above = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
            return next(((key, parent) for parent in above if OmegaConf.select(cfg, parent) is None), None)
    return None


def _explain_missing_option(error: MissingConfigException) -> str:
    if needed := elsewhere.OPTIONS.get(str(error.missing_cfg_file)):
        return f"{needed} is not installed; install it by: pip install 'trinity-sync[{elsewhere.EXTRA}]'"
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = list(error.options or [])
    if not group:
        return f"there is no configuration {option}.yaml in {config.conf_dir()}"
    if not known:
        known = sorted(found.stem for found in (config.conf_dir() / group).glob("*.yaml"))
    return f"{group}={option} is no option; {group} has {', '.join(known)}{_near(option, known)}"


def _explain_unknown_key(key: str, text: str, cause: BaseException | None) -> str:
    parent, _, last = key.rpartition(".")
    kind = re.search(r"object_type=(\w+)", text)
    schema = next((node for node in config.SCHEMA.values() if kind and node.__name__ == kind[1]), None)
    node = getattr(cause, "parent_node", None)
    known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    if schema:  # an option of the user's own may have given it keys beside those
        known = [name for name in dict.fromkeys([*(f.name for f in fields(schema)), *known]) if name != "_target_"]
        known += [] if parent else ["experiment"]
    told = f"{key} is no setting"
    if known:
        told += f"; {parent or 'the configuration'} has {', '.join(known)}{_near(last, known)}"
    return told + ("" if schema else f"; to add a key of your own, write +{key}=...")


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
