"""Work at the mirror in a process of its own: ``python -m trinity_sync.checkpoint.mirror_process``, and its parent.

One process per try, so that a client that hangs or a connection that is broken is gone with it, and nothing of the
library that speaks to the place is felt by the monitor. The parent sends one pickled job; the child answers in lines
of JSON, also while it moves bytes, and ends when the parent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import tenacity

from trinity_sync.checkpoint.storage import without_secrets
from trinity_sync.errors import RunError

#: How often the child says that bytes are moving, and what is more than its own small change.
_BEAT_S = 1.0
_BEAT_BYTES = 1 << 16
_MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class MirrorSettings:
    """How a mirror is kept (`checkpoint.mirror_*`).

    Args:
        options: for the fsspec class of the place.
        keep: ``same``: the retention policies hold there too; ``all``: nothing is deleted there.
        tries: how often one piece of work is tried.
        backoff_s: wait after the first failure; doubles with each one, up to a minute.
        timeout_s: a try that moves no bytes for so long is broken off.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    keep: Literal["same", "all"] = "same"
    tries: int = 8
    backoff_s: float = 2.0
    timeout_s: float = 300.0


class MirrorError(RunError):
    """A try failed.

    Args:
        final: another one would fail as well: what is to be copied is gone or damaged.
    """

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


def call_mirror(
    place: str,
    settings: MirrorSettings,
    job: Mapping[str, Any],
    *,
    on_line: Callable[[dict[str, Any]], None] = lambda line: None,
    tick: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Have a job done in a process of its own, once.

    Args:
        place: a path, or a URL that fsspec knows.
        job: ``do`` (a name of `_JOBS`) and its arguments.
        on_line: gets what the child says on the way: ``{"say": text}``.
        tick: called about once a second.
        stop: set: the child is killed.
        log: the child's standard error is appended to it; None: it goes where this process's goes.

    Returns:
        What the job returned.

    Raises:
        MirrorError: it failed, moved nothing for `MirrorSettings.timeout_s`, or was stopped.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    errors = None
    try:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            errors = open(log, "ab")  # noqa: SIM115 - closed below, when the child has it
        child = subprocess.Popen(
            [sys.executable, "-m", "trinity_sync.checkpoint.mirror_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the run, which lets a copy finish
        )
    except OSError as error:
        raise MirrorError(f"the copying process could not be started: {error}") from error
    finally:
        if errors is not None:
            errors.close()
    try:
        return _converse(child, place, settings, job, on_line, tick, stop or threading.Event())
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what is left to be written has no reader any more
                pipe.close()


def _converse(
    child: subprocess.Popen[bytes],
    place: str,
    settings: MirrorSettings,
    job: Mapping[str, Any],
    on_line: Callable[[dict[str, Any]], None],
    tick: Callable[[], None],
    stop: threading.Event,
) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(OSError):  # it died at once; its end is read below
        pickle.dump({"place": place, "options": dict(settings.options), **job}, child.stdin)
        child.stdin.flush()
    heard = time.monotonic()
    pending = b""
    while True:
        if stop.is_set():
            raise MirrorError("the run ended meanwhile", final=True)
        tick()
        if not select.select([child.stdout], [], [], _BEAT_S)[0]:
            if time.monotonic() - heard > settings.timeout_s:
                raise MirrorError(f"nothing moved for {settings.timeout_s:g} s")
            continue
        heard = time.monotonic()
        chunk = os.read(child.stdout.fileno(), 1 << 16)
        if not chunk:
            raise MirrorError(f"the copying process ended with {child.wait()}")
        *lines, pending = (pending + chunk).split(b"\n")
        for line in map(json.loads, lines):
            if "failed" in line:
                raise MirrorError(without_secrets(line["failed"], place, settings.options), final=line["final"])
            if "done" in line:
                return line["done"]
            if "say" in line:
                on_line(line)


def try_again(
    settings: MirrorSettings,
    work: Callable[[], Any],
    on_failure: Callable[[str], None],
    stop: threading.Event | None = None,
) -> Any:
    """Repeat work that fails with a `MirrorError` that is not final, waiting longer each time.

    Args:
        on_failure: called after each failure with a sentence.

    Raises:
        MirrorError: the last failure.
    """

    def told(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error, pause = state.outcome.exception(), state.next_action.sleep
        on_failure(f"try {state.attempt_number} of {settings.tries} failed: {error}; the next is in {pause:g} s")

    stop = stop or threading.Event()
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(settings.tries) | tenacity.stop_when_event_set(stop),
        wait=tenacity.wait_exponential(multiplier=settings.backoff_s, max=max(_MAX_BACKOFF_S, settings.backoff_s)),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, MirrorError) and not error.final),
        sleep=tenacity.sleep_using_event(stop),
        before_sleep=told,
        reraise=True,
    )
    try:
        return retrying(work)
    except MirrorError as error:
        tries = retrying.statistics["attempt_number"]
        on_failure(f"given up{f' after {tries} tries' if tries > 1 else ''}: {error}")
        raise


# ---- the child


def _probe(mirror: Any, storage: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the place can be written, read and listed; returns the steps that are checkpoints there."""
    name = f".probe-{os.getpid()}"
    storage.write(name, "probe")
    read = storage.read(name)
    storage.delete(name)
    if read != "probe":
        raise RunError("what is written there cannot be read back")
    return {"steps": mirror.steps()}


def _missing(mirror: Any, storage: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    return {"steps": mirror.missing(job["root"], job["steps"])}


def _upload(mirror: Any, storage: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    uploaded = mirror.upload(job["root"], job["step"], start=job["start"])
    result = {"bytes": uploaded.bytes, "skipped_files": uploaded.skipped}
    if job["policies"] is not None:
        try:
            mirror.retain(job["policies"], job["root"], now=time.time())
        except Exception as error:
            result["problem"] = f"what retention gives up could not be deleted there: {_text(error)}"
    return result


def _download(mirror: Any, storage: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    from trinity_sync.checkpoint.layout import NewerFormatError

    try:
        step = mirror.download(job["root"], newer_than=job["newer_than"], say=lambda text: _emit({"say": text}))
    except NewerFormatError as error:
        return {"step": None, "unknown": str(error)}
    return {"step": step, "unknown": None}


_JOBS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], dict[str, Any]]] = {
    "probe": _probe,
    "missing": _missing,
    "upload": _upload,
    "download": _download,
}

_out: IO[str]
_out_lock = threading.Lock()


def _main() -> None:
    global _out
    # Clients that print do not disturb the conversation.
    _out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_beat, daemon=True).start()
    try:
        from trinity_sync.checkpoint.layout import ManifestError
        from trinity_sync.checkpoint.mirror import DamagedError, Mirror
        from trinity_sync.checkpoint.storage import Storage

        def open_storage() -> Storage:
            return Storage(job["place"], job["options"])

        try:
            _emit({"done": _JOBS[job["do"]](Mirror(open_storage), open_storage(), job)})
        except (ManifestError, DamagedError) as error:
            _emit({"failed": str(error), "final": True})
    except Exception as error:
        _emit({"failed": _text(error), "final": isinstance(error, ImportError)})
    # Clients leave threads and connections behind, for which nobody has to wait.
    os._exit(0)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RunError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def _emit(line: Mapping[str, Any]) -> None:
    with _out_lock:
        _out.write(json.dumps(line) + "\n")
        _out.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _beat() -> None:
    """Say so whenever bytes have moved: all of them are read from files here, or written to some."""
    before = _moved()
    while True:
        time.sleep(_BEAT_S)
        now = _moved()
        if now is None or before is None or now - before > _BEAT_BYTES:
            _emit({"moving": True})
            before = now


def _moved() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    figures = dict(line.split(": ") for line in lines)
    return int(figures["rchar"]) + int(figures["wchar"])


if __name__ == "__main__":
    _main()
