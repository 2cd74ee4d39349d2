"""The command `trinity-sync plan`: seconds, bytes and memory of syncs and saves on machines that need not be here.

plan.json has the formulas, over the sizes of a plan and constants that were measured. The output has each figure's
formula beside it. docs/plan.md explains them, and compares them with measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from trinity_sync.errors import ConfigError, WaitLimit, grown, limit_text, near

Figures = Mapping[str, float]
"""Sizes of a plan and constants, by the names that formulas use. Bytes, seconds, bytes a second."""


class Constant(NamedTuple):
    """A number that was measured, and where."""

    value: float
    unit: str  # ``B/s``, ``s``, ``B``, or nothing
    source: str


Constants = Mapping[str, Constant]
_TABLES = json.loads(Path(__file__).with_name("plan.json").read_text(encoding="utf-8"))
CONSTANTS: Constants = {name: Constant(*row) for name, row in _TABLES["constants"].items()}
MODELS: Mapping[str, Sequence[int]] = _TABLES["models"]
"""Bytes in bf16 and tensors of the shapes in models/published, so that a plan of theirs needs no torch."""
_FORMULAS: Mapping[str, str] = _TABLES["formulas"]
"""By step, alone or with ``cpu`` or ``gpu``, ``here`` (one node) or ``far``, or both. B is V or, of a delta, D."""
_STEPS: Mapping[str, Sequence[str]] = _TABLES["steps"]
_LIMITS: Mapping[str, Sequence[str]] = _TABLES["limits"]
"""By step: the bytes by which its limit grows (docs/sync.md#limits-of-the-waits), and what to do beyond it."""
_MOVED: Mapping[str, str] = _TABLES["moved"]
MEMORY: Mapping[str, str] = _TABLES["memory"]


class Inputs(NamedTuple):
    """The machines and the model of a plan. `ranks`, `cores`: None for what fits."""

    nodes: int
    explorers: int
    model_bytes: int  # of a version, in bf16
    tensors: int
    link: float = math.inf  # bytes a second of a node, each way
    gpus: int = 0  # of a node; 0: CPUs alone
    tp: int = 1
    ranks: int | None = None
    cores: int | None = None
    changed: float = 0.007  # share of the elements
    timeout_s: float = 60.0
    min_rate_mbps: float = 100.0


@dataclass(frozen=True)
class PlannedStep:
    """A step of a transfer. `problem`: its limit would be exceeded, and what to do."""

    name: str
    seconds: float
    formula: str
    problem: str | None = None


@dataclass(frozen=True)
class PlannedTransfer:
    """A sync or a save. Its steps follow each other."""

    mode: str
    encoding: str
    nbytes: float  # that are made
    moved: float  # over links, or into and out of files
    steps: tuple[PlannedStep, ...]

    @property
    def seconds(self) -> float:
        """From trained to served, or to committed."""
        return sum(step.seconds for step in self.steps)

    @property
    def blocked_s(self) -> float:
        """While training stands still, in lockstep."""
        return sum(step.seconds for step in self.steps if step.name in _TABLES["blocking"])

    @property
    def limiting(self) -> PlannedStep:
        """The longest step."""
        return max(self.steps, key=lambda step: step.seconds)


def figures(given: Inputs, constants: Constants = CONSTANTS) -> Figures:
    """Place the processes; return what formulas use. ConfigError: they have no room."""
    from trinity_sync.weights.delta import expected_bytes

    nodes, gpus, tp, explorers = given.nodes, given.gpus, given.tp, given.explorers
    if not gpus:  # all ranks on one node, explorers on the others
        ranks, others = given.ranks or 2, min(explorers, nodes - 1)
        trainers, here = 1, 0 if others else explorers
    else:
        if tp > gpus:
            raise ConfigError(f"--tp is {tp}, but a node has {gpus} GPUs (--gpus); give at most that")
        left = nodes * gpus - explorers * tp
        need = f"--explorers {explorers} of --tp {tp} need {explorers * tp} GPUs, and all nodes have {nodes * gpus}"
        if left < 1:
            raise ConfigError(f"{need}: none is left for the trainer; give fewer --explorers, or more --nodes")
        if given.ranks and given.ranks > gpus and given.ranks % gpus:
            raise ConfigError(f"--ranks is {given.ranks}; give a multiple of a node's {gpus} GPUs, or less than that")
        # whole nodes, or a part of one
        most_first = chain(range(left // gpus * gpus, 0, -gpus), range(min(gpus - 1, left), 0, -1))
        for ranks in [given.ranks] if given.ranks else most_first:
            trainers, fit = math.ceil(ranks / gpus), gpus // tp
            here = max(0, explorers - max(0, nodes - trainers) * fit)
            if trainers <= nodes and here * tp <= trainers * gpus - ranks:
                break
        else:
            told = f"--ranks {given.ranks} do" if given.ranks else "a rank does"
            raise ConfigError(f"{need}: {told} not fit beside them; give fewer, or more --nodes")
        others = math.ceil((explorers - here) / fit)
    most = max(here, math.ceil((explorers - here) / others) if others else 0)
    nbytes, elements = given.model_bytes, given.model_bytes // 2
    delta = expected_bytes("gap8z", elements, 2, round(elements * given.changed))
    state = 6 * nbytes  # fp32: weights and two averages of Adam
    cores = given.cores or max(math.ceil(ranks / trainers), most)
    known = {name: one.value for name, one in constants.items()} | {"V": nbytes, "D": delta, "S": state}
    known |= {"T": given.tensors, "R": ranks, "N": trainers, "E": explorers, "TP": tp, "M": others}
    return known | {"F": others + (here > 0), "K": most, "C": cores, "L": given.link}


def value(formula: str, known: Figures) -> float:
    """Compute a formula of plan.json."""
    functions = {"min": min, "max": max, "ceil": math.ceil, "log2": math.log2}
    # Formulas are text, since the output shows them; none comes from outside.
    return float(eval(formula, {"__builtins__": {}}, {**functions, **known}))


def transfers(given: Inputs, constants: Constants = CONSTANTS) -> Iterator[PlannedTransfer]:
    """Plan a sync in each mode and encoding, then a full save. Where no part travels there are no deltas."""
    known = figures(given, constants)
    device, place = "gpu" if given.gpus else "cpu", "far" if given.nodes > 1 else "here"
    limit = WaitLimit(given.timeout_s, given.min_rate_mbps)
    for title, names in _STEPS.items():
        mode, encoding = title.split()
        if encoding == "delta" and not known["M"]:
            continue
        sizes = {**known, "B": known["S" if mode == "save" else "D" if encoding == "delta" else "V"]}
        steps = []
        for name in names:
            if name != "bring" or known["M"]:
                keys = (name, f"{name} {device}", f"{name} {place}", f"{name} {device} {place}")
                steps.append(_step(name, next(_FORMULAS[key] for key in keys if key in _FORMULAS), sizes, limit))
        moved = value(_MOVED.get(f"{mode} {device}", _MOVED[mode]), sizes)
        yield PlannedTransfer(mode, encoding, sizes["B"], moved, tuple(steps))


def _step(name: str, formula: str, sizes: Figures, limit: WaitLimit) -> PlannedStep:
    seconds, problem = value(formula, sizes), None
    nbytes, advice = _LIMITS.get(name.partition(" ")[0], ("0", ""))
    longest = grown(limit, int(value(nbytes, sizes)), more_s=-0.75 * limit if name == "fetch" else 0.0)
    if advice and seconds > longest:
        problem = f"{name} takes {seconds:,.0f} s, and its limit is {limit_text(longest)}: {advice}"
    return PlannedStep(name, seconds, formula, problem)


def memory(known: Figures) -> dict[str, float]:
    """Return the bytes of each process or store, by the names of `MEMORY`."""
    without = () if known["M"] else ("another node", "object store")
    return {role: value(MEMORY[role], known) for role in MEMORY if not any(word in role for word in without)}


# ---- the command


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `trinity-sync plan`."""

    def add(name: str, kind: Callable[[str], object], metavar: str, text: str, default: float | None = None) -> None:
        parser.add_argument(name, type=kind, metavar=metavar, help=text, default=default)

    count, number = _reader(1, int), _reader(0, float)
    parser.add_argument("--nodes", type=count, required=True, metavar="N", help="nodes of the cluster")
    parser.add_argument("--gpus", type=_reader(0, int), required=True, metavar="N", help="of a node; 0: CPUs alone")
    parser.add_argument("--explorers", type=count, required=True, metavar="N", help="explorer.replicas")
    parser.add_argument("--model", required=True, help=f"{', '.join(MODELS)}, a model's folder, or a config.json")
    add("--links", number, "GBIT", "Gbit/s of a node, each way; needed for several nodes")
    add("--tp", count, "N", "GPUs of an explorer (default 1)", 1)
    add("--ranks", count, "N", "backend.ranks (default: whole nodes of the GPUs left; on CPUs 2)")
    add("--cores", count, "N", "of a node (default: one for each rank and explorer)")
    add("--changed", number, "PERCENT", "share of the weights that a step changes (default 0.7)", 0.7)
    add("--gpu-gb", number, "GB", "memory of a GPU (default 80)", 80.0)
    add("--timeout-s", number, "S", "sync.timeout_s (default 60)", 60.0)
    add("--min-rate-mbps", number, "MBIT", "sync.min_rate_mbps (default 100)", 100.0)
    add("--measured", Path, "FILE", "constants in place of the documented ones; see `doctor --measure`")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(command=_plan)


def _reader(least: int, kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return the reader of a whole number, at least `least`, or of any number above it."""

    def read(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if not (least <= found <= 1e9 and (found > least or kind is int)):
            what = f"a whole number from {least}" if kind is int else f"a number above {least}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} to 1e9")
        return found

    return read


def _plan(options: argparse.Namespace) -> int:
    if options.nodes > 1 and options.links is None:
        raise ConfigError(f"--nodes is {options.nodes}, so --links is needed: Gbit/s of a node, such as --links 100")
    if options.changed > 100:
        raise ConfigError(f"--changed is {options.changed:g}; give at most 100 percent")
    constants = {**CONSTANTS, **(_measured(options.measured) if options.measured else {})}
    link = options.links * 1e9 / 8 if options.links else math.inf
    nbytes, tensors = _size(options.model)
    given = Inputs(options.nodes, options.explorers, nbytes, tensors, link, options.gpus, options.tp, options.ranks)
    given = given._replace(cores=options.cores, changed=options.changed / 100)
    given = given._replace(timeout_s=options.timeout_s, min_rate_mbps=options.min_rate_mbps)
    known, found = figures(given, constants), list(transfers(given, constants))
    return _print(known, found, list(_notes(known, found, options)), constants, as_json=options.json)


def _notes(known: Figures, found: Sequence[PlannedTransfer], options: argparse.Namespace) -> Iterator[str]:
    held = memory(known)
    for role, advice in (("explorer, each device", "--tp"), ("trainer rank, its device", "--ranks")):
        if options.gpus and held[role] > options.gpu_gb * 1e9:
            room = f"a GPU has {options.gpu_gb:g} GB (--gpu-gb)"
            yield f"{role}: {held[role] / 1e9:,.0f} GB, and {room}; give more {advice}, with enough GPUs"
    for one in found:
        yield from (f"{one.mode}, {one.encoding}: {step.problem}" for step in one.steps if step.problem)
    seconds = {(one.mode, one.encoding): one.seconds for one in found}
    pays = [mode for mode, kind in seconds if kind == "delta" and seconds[mode, kind] < seconds[mode, "full"]]
    if known["M"]:
        yield f"deltas pay with sync={', '.join(pays)}" if pays else "deltas pay in no mode: sync.encoding=full"


def _print(
    known: Figures, found: Sequence[PlannedTransfer], notes: Sequence[str], constants: Constants, *, as_json: bool
) -> int:
    from trinity_sync.cli.tables import print_json, print_table
    from trinity_sync.tracking.units import number, seconds, size

    sizes = {name: one for name, one in known.items() if name not in constants and one < math.inf}
    held = memory(known)
    used = [*(step.formula for one in found for step in one.steps), *(MEMORY[role] for role in held)]
    words = set(re.findall(r"\w+", " ".join(used)))
    shown = {name: one for name, one in constants.items() if name in words}
    if as_json:
        syncs = [{**asdict(one), "seconds": one.seconds, "blocked_s": one.blocked_s} for one in found]
        roles = [{"role": role, "bytes": held[role], "formula": MEMORY[role]} for role in held]
        named = {name: one._asdict() for name, one in shown.items()}
        return print_json({"sizes": sizes, "transfers": syncs, "memory": roles, "constants": named, "notes": notes})
    rows, steps = [], []
    for one in found:
        longest = f"{one.limiting.name}, {seconds(one.limiting.seconds)}"
        times = seconds(one.seconds), seconds(one.blocked_s), longest
        rows.append((one.mode, one.encoding, size(one.nbytes), size(one.moved), *times))
        steps += [(one.mode, one.encoding, step.name, seconds(step.seconds), step.formula) for step in one.steps]
    show = {"B/s": lambda one: f"{size(one)}/s", "s": seconds, "B": size, "": number}
    for head, lines in (
        (("", "encoding", "bytes", "moved", "seconds", "training waits", "longest step"), rows),
        (("", "encoding", "step", "seconds", "formula"), steps),
        (("size", "", "of"), [(name, f"{sizes[name]:,.0f}", _TABLES["sizes"][name]) for name in sizes]),
        (("memory of", "bytes", "formula"), [(role, size(held[role]), MEMORY[role]) for role in held]),
        (
            ("constant", "value", "source"),
            [(name, show[one.unit](one.value), one.source) for name, one in shown.items()],
        ),
    ):
        print_table(head, lines)
        print()
    for note in notes:
        print(f"note: {note}")
    return 0


def _measured(file: Path) -> dict[str, Constant]:
    try:
        found = json.loads(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--measured: {file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--measured: {file} holds no object; make it by `trinity-sync doctor --measure {file}`")
    for name, one in found.items():
        if name not in CONSTANTS:
            raise ConfigError(f"--measured: {file} has {name}, which is no constant{near(name, CONSTANTS)}")
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < math.inf:
            raise ConfigError(f"--measured: {name} of {file} is {one!r}; it must be a number above 0")
    return {name: CONSTANTS[name]._replace(value=one, source=str(file)) for name, one in found.items()}


def _size(model: str) -> Sequence[int]:
    """Return bytes in bf16 and tensors of a model: a published name, a folder, or a config.json."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model).expanduser()
    if path.is_dir():
        from trinity_sync.config.model_checks import tensor_shapes

        if shapes := tensor_shapes(path):
            return 2 * sum(map(math.prod, shapes)), len(shapes)
        path /= "config.json"
    if not path.is_file():
        known = ", ".join(MODELS)
        raise ConfigError(
            f"--model is {model}, and {path} is no file; give {known}, a model's folder, or a config.json"
        )
    from trinity_sync.models.shapes import bytes_by_layers, cut, read_shapes, saved_shapes

    try:
        saved = saved_shapes(cut(read_shapes(str(path)), None)[0])
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.shapes", "--model")) from error
    return bytes_by_layers(saved)[-1], len(saved)
