"""The driver's side of the mirror: before a run, whether the place can be used; before a resume, what it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trinity_sync.checkpoint.catalog import CheckpointInfo
from trinity_sync.checkpoint.layout import NewerFormatError
from trinity_sync.checkpoint.mirror_process import MirrorError, MirrorSettings, call_mirror, try_again
from trinity_sync.checkpoint.storage import local_folder, shown
from trinity_sync.errors import ConfigError, RunError

#: A place that is asked for the first time has so long to answer.
_PROBE_S = 60.0


def check_place(place: str, settings: MirrorSettings, root: Path, *, log: Path | None = None) -> None:
    """Find out before a run whether its mirror can be written, and is free.

    Args:
        root: the local checkpoint folder.
        log: the copying process's own words are appended to it.

    Raises:
        ConfigError: it cannot be used, holds checkpoints of another run, or is the checkpoint folder itself.
    """
    _check_apart(place, root)
    brief = replace(settings, timeout_s=min(settings.timeout_s, _PROBE_S))
    try:
        steps = call_mirror(place, brief, {"do": "probe"}, log=log)["steps"]
    except MirrorError as error:
        raise ConfigError(
            f"checkpoint.mirror={shown(place)} cannot be used: {error}; name a place that can be written to, "
            f"with checkpoint.mirror_options where it needs them, or null for none"
        ) from error
    if steps:
        raise ConfigError(
            f"checkpoint.mirror={shown(place)} holds checkpoints of another run already; name a place of this run's own"
        )


def fetch_newer(
    place: str,
    settings: MirrorSettings,
    root: Path,
    best: CheckpointInfo | None,
    *,
    least: int = 0,
    say: Callable[[str], None],
    log: Path | None = None,
) -> int | None:
    """Bring the mirror's newest good checkpoint into the local folder where it is newer than the best one here.

    Args:
        root: the local checkpoint folder, used by nobody else meanwhile.
        best: the newest good one here; None: there is none.
        least: nothing older than this step would do.
        say: gets a sentence for all that the user should know.

    Returns:
        The step that was fetched; None: the mirror has nothing that is newer and would do, or cannot be reached and
        there is a `best`.

    Raises:
        ConfigError: the mirror is the checkpoint folder itself.
        NewerFormatError: what is newer there was written by a later version of this program.
        RunError: the mirror cannot be reached and there is nothing here.
    """
    _check_apart(place, root)
    here = best.step if best is not None else 0
    known = ((best.attempt or 0) if best is not None else 0, max(here, least - 1))
    try:
        result = try_again(
            settings,
            lambda: call_mirror(
                place,
                settings,
                {"do": "download", "root": root, "newer_than": known},
                on_line=lambda line: say(line["say"]),
                log=log,
            ),
            lambda text: say(f"the mirror {shown(place)}: {text}"),
        )
    except MirrorError as error:
        if best is not None:
            then = f"; going on from step {here}, which is here" if here >= least else ""
            say(f"the mirror cannot be asked for a newer checkpoint{then}")
            return None
        raise RunError(
            f"no checkpoint in {root} verifies, and the mirror {shown(place)} cannot be asked for one: {error}; "
            f"try again when it can be reached, or begin again at step 1 with --from-scratch"
        ) from error
    if result["unknown"]:
        raise NewerFormatError(f"the mirror {shown(place)}: {result['unknown']}")
    return result["step"]


def _check_apart(place: str, root: Path) -> None:
    folder = local_folder(place)
    if folder is not None and folder.resolve() == root.resolve():
        raise ConfigError(f"checkpoint.mirror={place} is the checkpoint folder itself; name another place")
