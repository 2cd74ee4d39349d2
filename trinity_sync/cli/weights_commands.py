"""`trinity-sync weights`, `follow`, `ckpt export` and `ckpt diff`. torch is imported when one of them runs."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trinity_sync.checkpoint.folder import leases
from trinity_sync.checkpoint.folder.catalog import bytes_in, history, scan
from trinity_sync.checkpoint.folder.contents import DELTAS, step_of
from trinity_sync.checkpoint.folder.leases import check_free, find_config
from trinity_sync.cli.checkpoints import PATH_HELP, add_step, find, given_step, newest, of_step
from trinity_sync.cli.tables import print_json, print_table
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.host.interrupts import handling
from trinity_sync.host.masking import shown
from trinity_sync.protocol.parts import version_folder
from trinity_sync.tracking import units
from trinity_sync.tracking.units import progress_bar

if TYPE_CHECKING:
    from trinity_sync.checkpoint.difference import TensorDifference

_DTYPES = ("bf16", "fp16", "fp32", "as-saved")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MODEL_KEYS = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_experts")
_LEASE_S = 600.0
_RENEW_S = 60.0

_EXPORT = """\
Write the weights of a checkpoint as a Hugging Face folder: config, generation config, tokenizer and safetensors,
sharded with an index where they are large. PATH may also be a checkpoint that verl or Trinity wrote. Where the
checkpoint's manifest has a digest, the weights must have it: exit code 1 where they do not, and nothing is written. A
LoRA run's checkpoint holds the adapter: it is written as a folder of peft's, or merged into its base (--merged)."""

_WEIGHTS = """\
Write the weights of any version of a run with retention=[keep_last,keep_versions], as `ckpt export` does. They must
have the version's digest: exit code 1 where they do not, or where what leads to the version is lost."""

_DIFF = """\
Compare the weights of two checkpoints bit by bit. A and B: a step folder, a run (its newest checkpoint) or a Hugging
Face folder. A line per tensor that differs: elements changed, the largest and the mean absolute difference, and the
difference relative to A (sum of absolute differences over sum of absolute values)."""

_FOLLOW = """\
Keep DIR/current, a link to a complete Hugging Face folder, at the newest version of a run with sync.store=URL. No Ray
and no running trainer are needed. Deltas are taken where they have fewer bytes than the whole version; everything is
checked by its digest before the link moves. The command may be killed at any moment and started again."""

_FOLLOW_CODES = (
    "exit codes: 0 with --once: DIR has the newest version; 1 it has not; 2 a wrong command line; 130 interrupted"
)
_LOAD_S = 600.0
"""Timeout of an engine's load, seconds, besides the time for its bytes."""
_LOAD_RATE = 12.5e6
"""The slowest rate at which an engine may read a version, bytes a second."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add export and diff to the commands of `trinity-sync ckpt`."""
    export = commands.add_parser("export", help="write a Hugging Face folder", description=_EXPORT)
    export.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    add_step(export, "the step; the newest if left out")
    _add_options(export, "bf16", "which versions travel in by default")
    export.set_defaults(command=_export)

    diff = commands.add_parser(
        "diff",
        help="compare the weights of two checkpoints; exit code 1 where they differ",
        description=_DIFF,
        epilog="exit codes: 0 all tensors are equal; 1 some differ, or weights cannot be read; 2 a wrong command line",
    )
    diff.add_argument("a", type=Path, metavar="A", help="the one to compare with")
    diff.add_argument("b", type=Path, metavar="B", help="the other")
    diff.add_argument(
        "--dtype", choices=_DTYPES, default="as-saved", help="cast both first (default: compare as they are saved)"
    )
    diff.add_argument("--json", action="store_true", help="print one JSON document")
    diff.set_defaults(command=_diff)


def add_weights(weights: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `trinity-sync weights`."""
    weights.description = _WEIGHTS
    weights.add_argument("path", type=Path, metavar="RUN", help="folder of a run, or of its checkpoints")
    weights.add_argument(
        "version",
        type=_version,
        metavar="VERSION",
        help="its step, of the newest attempt with it; or ATTEMPT-STEP",
    )
    _add_options(weights, "as-saved", "the bits of the version")
    weights.set_defaults(command=_export)


def add_follow(follow: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `trinity-sync follow`."""
    follow.description, follow.epilog = _FOLLOW, _FOLLOW_CODES
    follow.add_argument("store", metavar="URL", help="the run's sync.store: a path, or a URL such as s3://bucket/run")
    follow.add_argument(
        "--into", type=Path, required=True, metavar="DIR", help="folder to keep; new or of this command"
    )
    follow.add_argument(
        "--notify", metavar="URL", help="engine that loads each version, such as http://127.0.0.1:30000"
    )
    follow.add_argument("--engine", choices=("sglang", "vllm"), default="sglang", help="of --notify (default: sglang)")
    follow.add_argument(
        "--every", type=_seconds, default=10.0, metavar="S", help="seconds from one look to the next (default: 10)"
    )
    follow.add_argument("--once", action="store_true", help="look once, and end")
    follow.set_defaults(command=_follow)


def _add_options(export: argparse.ArgumentParser, dtype: str, why: str) -> None:
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write; new or empty")
    export.add_argument(
        "--dtype", choices=_DTYPES, default=dtype, help=f"dtype of floating tensors (default: {dtype}, {why})"
    )
    export.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="largest file of weights (default: 5GB)"
    )
    export.add_argument(
        "--config", type=Path, metavar="DIR", help="folder with config and tokenizer, where the checkpoint has none"
    )
    form = export.add_mutually_exclusive_group()
    form.add_argument("--adapter", action="store_true", help="of a LoRA run: the adapter, as peft loads it (default)")
    form.add_argument("--merged", action="store_true", help="of a LoRA run: the adapter merged into its base")
    export.add_argument(
        "--base", type=Path, metavar="DIR", help="with --merged: the base, where it is not in the run's model.path"
    )
    export.add_argument("--json", action="store_true", help="print one JSON document")


# ---- commands


def _export(options: argparse.Namespace) -> int:
    wanted = _wanted(options) if "version" in options else None
    folder = _weights_of(options.path, given_step(options)) if wanted is None else wanted[0]
    check_free(options.output)
    from trinity_sync.checkpoint.export import export_checkpoint, restored

    with ExitStack() as opened:
        # so that a signal leaves no copy of a version
        opened.enter_context(handling((signal.SIGTERM, signal.SIGHUP), lambda number, frame: sys.exit(128 + number)))
        made = None if wanted is None else opened.enter_context(restored(*wanted, options.output))
        keep = opened.enter_context(_leased(folder))  # a history needs none
        progress = opened.enter_context(progress_bar("exporting", shown=not options.json))

        def report(done: int, total: int) -> None:
            keep()
            progress(done, total)

        done = export_checkpoint(
            folder if made is None else made.base,
            options.output,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_size,
            config=options.config,
            form="merged" if options.merged else "adapter" if options.adapter else None,
            base=options.base,
            progress=report,
            version=made,
        )
    source = done.source if wanted is None else version_folder(wanted[0] / DELTAS, wanted[1])
    if options.json:
        return print_json(
            {
                "source": str(source),
                "step": step_of(source.resolve().name) if wanted is None else wanted[1][1],
                "format": done.format,
                "output": str(done.output),
                "files": list(done.files),
                "tensors": done.tensors,
                "bytes": done.bytes,
                "dtypes": list(done.dtypes),
                "digest": done.digest,
                "manifest_digest": done.checked,
                "left_out": list(done.left_out),
                "missing": list(done.missing),
            }
        )
    amount = (
        f"{units.plural(done.tensors, 'tensor')}, {units.size(done.bytes)} in {units.plural(len(done.files), 'file')}"
    )
    print(f"{source} ({done.format})\n-> {done.output}: {amount}, {', '.join(done.dtypes)}")
    # the manifest's digest is the adapter's; it is checked before the merge
    of = "the manifest" if wanted is None else "the version"
    print(f"digest {done.digest}{'' if options.merged else _checked(done.digest, done.checked, of)}")
    if done.left_out:
        print(f"with {units.plural(len(done.left_out), 'tensor')} of the model's folder that were not trained")
    if done.missing:
        print(
            f"note: {units.plural(len(done.missing), 'tensor')} that the model's folder had, such as draft heads, are "
            f"not there any more, or not as they were, and so not in the export: {', '.join(done.missing[:2])}",
            file=sys.stderr,
        )
    return 0


def _checked(digest: str, manifest: str | None, of: str) -> str:
    if manifest is None:
        return " (the checkpoint has none to compare with)"
    return f", that of {of}" if digest == manifest else f"; in wire dtype {manifest}, that of {of}"


def _diff(options: argparse.Namespace) -> int:
    folders = [_weights_of(path, None) for path in (options.a, options.b)]
    from trinity_sync.checkpoint.difference import compare
    from trinity_sync.checkpoint.export import DTYPES
    from trinity_sync.checkpoint.reading import open_weights

    with (
        _leased(folders[0]) as keep_a,
        _leased(folders[1]) as keep_b,
        progress_bar("comparing", shown=not options.json, in_bytes=False) as progress,
    ):

        def report(done: int, total: int) -> None:
            keep_a()
            keep_b()
            progress(done, total)

        a, b = map(open_weights, folders)
        if a.adapter != b.adapter:
            adapter, whole = folders if a.adapter else folders[::-1]
            raise ConfigError(
                f"{adapter} holds a LoRA adapter and {whole} whole weights, which cannot be compared; merge the "
                "adapter first: trinity-sync ckpt export PATH --merged --output DIR"
            )
        compared = compare(a, b, dtype=DTYPES[options.dtype], progress=report)
    differing = [found for found in compared if found.differs]
    if options.json:
        print_json(
            {
                "a": str(folders[0]),
                "b": str(folders[1]),
                "dtype": options.dtype,
                "equal": not differing,
                "tensors": len(compared),
                "differing": [asdict(found) for found in differing],
            }
        )
        return 1 if differing else 0
    print_table(("tensor", "", "changed", "max", "mean", "relative"), [_difference_row(found) for found in differing])
    print(f"A {folders[0]}\nB {folders[1]}\n{_summary(compared, differing, options.dtype)}")
    if text := _other_model(folders, compared):
        print(text)
    return 1 if differing else 0


def _follow(options: argparse.Namespace) -> int:
    from trinity_sync.checkpoint.mirror.follower import VersionFollower
    from trinity_sync.host.urls import absolute, place_problem

    if problem := place_problem(options.store):
        raise ConfigError(f"URL {problem}")
    notify = None if options.notify is None else _engine(options.engine, options.notify)
    follower = VersionFollower(absolute(options.store), options.into, _warn)
    told, refused, loaded = "", "", None
    follower.open()
    while True:
        began, problem = time.monotonic(), ""
        try:
            updated = follower.update()
        except RunError as error:
            updated, problem = False, f"{shown(options.store)}: {error}"
        version = follower.version
        if problem and problem != told:
            stays = "there is none here yet" if version is None else f"{follower.current} stays at version {version}"
            _warn(f"{problem}; {stays}")
        told = problem
        if updated:
            print(f"version {version} in {time.monotonic() - began:.1f} s: {follower.current}", flush=True)
        failed = False
        if notify is not None and version is not None and version != loaded:
            try:
                notify(follower.folder, str(version))  # by the link, a late engine might read files of two versions
            except (RunError, OSError) as error:  # such as an engine that starts later
                failed = True
                if str(error) != refused:
                    _warn(f"{error}; it is asked again at each look")
                refused = str(error)
            else:
                loaded, refused = version, ""
                print(f"version {version} loaded by {shown(options.notify)}", flush=True)
        if not problem:  # else what has arrived is of use at the next look
            follower.tidy()
        if options.once:
            return 1 if problem or failed else 0
        time.sleep(options.every)


def _engine(kind: str, url: str) -> Callable[[Path, str], None]:
    """Return a function that has an engine load a folder. It takes the folder and the version, which errors name, and
    raises RunError.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"--notify {shown(url)} is no address; give one such as http://127.0.0.1:30000")
    from trinity_sync.integrations.vllm.server import ServerClient

    server = ServerClient(url.rstrip("/"), _LOAD_S)
    server.who = f"the {'SGLang' if kind == 'sglang' else 'vLLM'} server at {shown(url)}"

    def sglang(folder: Path, version: str) -> None:
        what = f"load version {version}"
        answer = server.post("/update_weights_from_disk", what, {"model_path": str(folder)})
        if answer.get("success") is False:
            raise RunError(f"{server.who} failed to {what}: {answer.get('message')}")

    def vllm(folder: Path, version: str) -> None:
        server.post("/pause", "pause", params={"mode": "wait"})
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            server.post("/collective_rpc", f"load version {version}", body)
        except RunError as error:
            raise RunError(f"{error}; it stays paused until a version is loaded completely") from error
        server.post("/resume", "resume generation")

    def load(folder: Path, version: str) -> None:
        server.timeout_s = _LOAD_S + bytes_in(folder) / _LOAD_RATE
        (sglang if kind == "sglang" else vllm)(folder, version)

    return load


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; expected one such as 10")
    return found


# ---- finding things


def _weights_of(path: Path, step: int | None) -> Path:
    """Return the folder to read weights from: a step folder, or the path itself if it has weights."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "model_world_size_*.pt")
    has_weights = any(next(path.glob(pattern), None) is not None for pattern in patterns)
    if step is None and has_weights and step_of(path.resolve().name) is None:
        return path
    root, step = find(path, step)
    if step is not None:
        return of_step(root, scan(root), step)[0].path
    return newest(root).path


def _version(text: str) -> tuple[int | None, int]:
    attempt, _, step = text.rpartition("-")
    if not re.fullmatch(r"(\d+-)?\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version; expected a step, or ATTEMPT-STEP such as 1-20")
    return int(attempt) if attempt else None, int(step)


def _wanted(options: argparse.Namespace) -> tuple[Path, tuple[int, int]]:
    """Return the checkpoint folder, and the version (attempt, step) of its history that the user named."""
    root, in_path = find(options.path, None)
    if in_path is not None:
        raise ConfigError(f"{options.path} is one step; name the run: {root.parent}")
    there, (attempt, step) = history(root), options.version
    if not there:
        raise ConfigError(
            f"{options.path} has no history of versions: it is of runs with retention=[keep_last,keep_versions]; its "
            "checkpoints are exported by `trinity-sync ckpt export`"
        )
    if options.output.absolute().is_relative_to(root.absolute()):
        raise ConfigError(f"{options.output} lies in the checkpoint folder, which a run cleans; name another place")
    found = [one for one in there if one[1] == step and attempt in (None, one[0])]
    if found:
        return root, found[-1]
    by_attempt = {one: [of for an, of in there if an == one] for one, _ in there}
    spans = [f"{steps[0]} to {steps[-1]} of attempt {one}" for one, steps in by_attempt.items()]
    asked = f"step {step}" + ("" if attempt is None else f" of attempt {attempt}")
    older = step < min(min(steps) for steps in by_attempt.values())
    why = "is older than the history, so it was not kept" if older else "was not published, or not kept"
    raise ConfigError(f"{options.path}: {asked} {why}; there are {', '.join(spans)}")


@contextmanager
def _leased(folder: Path) -> Iterator[Callable[[], None]]:
    """Lease a checkpoint while it is read; yields the function that renews the lease. Foreign or read-only folders are
    read without a lease.
    """
    folder = folder.resolve()
    step = step_of(folder.name)
    lease = None
    if step is not None and (folder / "manifest.json").is_file():
        with suppress(OSError):
            lease = leases.lease_checkpoint(folder.parent, step, reader="trinity-sync ckpt", seconds=_LEASE_S)

    def keep() -> None:
        if lease is not None:
            lease.keep(_LEASE_S, renew_s=_RENEW_S)

    try:
        yield keep
    finally:
        if lease is not None:
            lease.release()


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get((match[2] or "").upper(), 0)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected one such as 5GB or 500MB")
    return size


# ---- printing


def _difference_row(found: TensorDifference) -> tuple[str, ...]:
    if found.a is None or found.b is None:
        return (found.name, f"only in {'B' if found.a is None else 'A'}: {found.a or found.b}", *("-",) * 4)
    what = str(found.a) if found.a == found.b else f"{found.a} in A, {found.b} in B"
    if found.a.shape != found.b.shape:
        return (found.name, what, *("-",) * 4)
    share = f"{found.changed} of {found.elements} ({found.changed / found.elements:.2%})" if found.elements else "0"
    if found.not_finite:
        share += f", {found.not_finite} not finite"
    relative = units.number(found.relative)
    return found.name, what, share, units.number(found.max_abs), units.number(found.mean_abs), relative


def _other_model(folders: list[Path], compared: list[TensorDifference]) -> str:
    """Explain the difference if the two are different models, not two states of one."""
    if all(found.a is not None and found.b is not None and found.a.shape == found.b.shape for found in compared):
        return ""
    configs = [_config_of(folder) for folder in folders]
    told = [
        f"{key} {configs[0][key]} in A, {configs[1][key]} in B"
        for key in _MODEL_KEYS
        if key in configs[0] and key in configs[1] and configs[0][key] != configs[1][key]
    ]
    return f"these are different models: {'; '.join(told) or 'tensors have other names or shapes'}"


def _config_of(folder: Path) -> Mapping[str, object]:
    place = find_config(folder)
    with suppress(OSError, ValueError):
        found = json.loads((place / "config.json").read_text(encoding="utf-8")) if place is not None else {}
        return found if isinstance(found, dict) else {}
    return {}


def _summary(compared: list[TensorDifference], differing: list[TensorDifference], dtype: str) -> str:
    cast = "" if dtype == "as-saved" else f" in {dtype}"
    if not differing:
        return f"equal{cast}, bit for bit: {units.plural(len(compared), 'tensor')}"
    text = f"{len(differing)} of {units.plural(len(compared), 'tensor')} differ{cast}"
    elements = sum(found.elements for found in compared)
    if elements:
        changed = sum(found.changed for found in compared)
        text += f"; {changed} of {elements} elements ({changed / elements:.2%})"
    both = [found for found in differing if found.a is not None and found.b is not None]
    if not cast and any(found.a.dtype != found.b.dtype for found in both if found.a and found.b):
        text += "; dtypes differ: --dtype bf16 compares them as explorers would hold them"
    return text
