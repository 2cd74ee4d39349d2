"""Checks all rows of a task's file before a run starts: each row and each of its characters must have tokens.
`task.too_long` decides about rows that are too long:

- ``refuse``: the run does not start; the error has the place of the first, their number, and the longest length;
- ``filter``: they are left out;
- ``truncate``: prompts lose their left end, pairs and conversations their right one.

Rows without any trained token are always refused. A child process tokenises, so that the driver does not load
transformers; the child does not load torch.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from trinity_sync.backends.option import accelerator_count
from trinity_sync.config import Config, build_task, validation_items, validation_task
from trinity_sync.config.composition import section
from trinity_sync.errors import ConfigError, RunError, TrinityError, in_one_line
from trinity_sync.host.child_process import ChildPipe, start_child
from trinity_sync.host.references import Settings, path_list
from trinity_sync.models.families import check_attention, class_problem, noise, vllm_problem
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.jsonl import FilePrompts
from trinity_sync.tasks.pairs import Item, shared_rows
from trinity_sync.trainer.algorithms.base import algorithm_of

if TYPE_CHECKING:
    from trinity_sync.models.tokens import ModelTokens

_CHUNK = 1000
_TELL_S = 3.0
_MESSAGE_S = 60
_TOKEN_CHARACTERS = 256
"""No token stands for more: the longest of the vocabularies in use are of 128 blanks."""
_TOKENIZER = re.compile(r"(?i)token|vocab|tekken|spiece|\.model$")
_LIMIT_S = 600.0
"""For the first rows, since the tokenizer may have to be fetched, and for each thousand of them."""


class RowCounts(NamedTuple):
    """Counts of the rows of a task."""

    rows: int  # number of rows
    too_long: int  # number of rows with more tokens than the settings or the model allow
    longest: int  # tokens of the longest row
    policy: str  # `task.too_long`


class ScannedTask(NamedTuple):
    """A task whose rows were checked."""

    task: Any  # the run's task, if it has one
    # None if the rows were not checked: there is no file, or the tokenizer is not available here.
    counts: RowCounts | None
    validation: Sequence[Item]  # the validation's prompts or rows, checked as well


NOTHING = ScannedTask(None, None, ())
"""Of a run without a task."""


class _Encoder(Protocol):
    limit: int | None
    cut: str

    @property
    def limit_text(self) -> str: ...

    def remedy(self, longest: int) -> str: ...

    def lengths(self, items: Sequence[Any], places: Sequence[str]) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class _ScanRequest:
    """The child's input."""

    task: Settings  # the keys of `task`
    prompts: bool  # whether the rows are prompts; otherwise pairs or conversations
    model_path: str | None  # the model's folder; None: it is created from `architecture`
    architecture: Mapping[str, object]
    trust_remote_code: bool  # whether code that comes with the model may run
    attention: str  # as transformers names it
    vllm_on_cpu: bool | None  # whether vLLM's explorers run on a CPU, judged by this machine; None: there are none
    rows: list[tuple[str, Item]]  # places and rows


class _ScanAnswer(NamedTuple):
    """The child's answer: numbers of the rows that are too long, from 0, and notes about the model."""

    counts: RowCounts | None
    too_long: list[int]
    notes: list[str]


class _UnreadableModel(NamedTuple):
    """The child's answer where there is no tokenizer."""

    reason: str


def scanned_task(cfg: Config) -> ScannedTask:
    """Build a run's task and look through its rows. Called by the driver, before Ray is started."""
    if cfg.workload.kind == "bytes":
        return NOTHING
    task = build_task(cfg.task, cfg.seed)
    counts = _look_through(cfg, task, cfg.task)
    if isinstance(task, FilePrompts):
        failed = task.reward_judge.trial(task.validation_prompts(1)[0], elsewhere=cfg.cluster.address is not None)
        note(f"task.reward: {failed}") if failed else None
    validating = validation_task(cfg)
    if validating is None:
        return ScannedTask(task, counts, ())
    if hasattr(validating, "all_rows"):
        _look_through(cfg, validating, section(cfg.task, "validation"))
    items = validation_items(cfg, validating)
    _tell_shared(cfg, task, validating, len(items))
    return ScannedTask(task, counts, items)


def _tell_shared(cfg: Config, task: Any, validating: Any, count: int) -> None:
    """Print a note about validation rows that are also trained on."""
    if not hasattr(task, "all_rows"):
        return
    shared = shared_rows((item for _, item in task.all_rows()), validating.all_rows()[:count])
    if shared:
        trained, validated = _path_text(cfg.task), _path_text(section(cfg.task, "validation"), "the validation")
        note(
            f"{len(shared)} of the {count} rows of {validated} are also in {trained}, the first of them {shared[0]}: "
            "the validation does not use new rows only"
        )


def _path_text(node: Settings, without: str = "the task") -> str:
    """Return the first path of a task's rows, and how many others there are, for display."""
    first, *others = path_list(node.get("path") or without)
    return f"{first} and {len(others)} more" if others else first


def _look_through(settings: Config, task: Any, node: Settings) -> RowCounts | None:
    """Check the model and the rows of a task with a file, and let the task leave out rows by its policy."""
    path = _path_text(node)
    _check_tokenizer(settings.model.path)
    all_rows: Callable[[], list[tuple[str, Item]]] | None = getattr(task, "all_rows", None)
    explores = algorithm_of(settings.algorithm).explores
    kind = settings.explorer.kind
    vllm = explores and kind in ("vllm", "vllm_server")
    on_cpu = kind == "vllm" and settings.cluster.address is None and accelerator_count() == 0
    if all_rows is None and settings.model.path is None and not vllm:
        return None  # the model is made, with a tokenizer of ours
    request = _ScanRequest(
        task=settings.task,
        prompts=explores,
        model_path=settings.model.path,
        architecture=settings.model.architecture or {},
        trust_remote_code=settings.model.trust_remote_code,
        attention=settings.model.attn_implementation,
        vllm_on_cpu=on_cpu if vllm else None,
        rows=[(place, _plain(item) if explores else item) for place, item in (all_rows() if all_rows else ())],
    )
    answer = _ask(request, path)
    if isinstance(answer, _UnreadableModel):
        if all_rows is None:
            return None
        if request.task.get("too_long", "refuse") == "filter":
            raise ConfigError(
                f"model.path={request.model_path} has no tokenizer that can be read here ({answer.reason}), by which "
                "task.too_long=filter would find the rows that are too long"
            )
        note(f"the rows of {path} are not looked through before the start: {answer.reason}")
        return None
    counts = answer.counts
    for text in answer.notes:
        note(text)
    if counts is None:
        return None
    for text in getattr(task, "unread", ()):
        note(text)
    if counts.policy == "filter" and answer.too_long:
        task.leave_out(answer.too_long)
    if counts.too_long:
        done = "left out" if counts.policy == "filter" else "cut"
        note(f"{counts.too_long} of {counts.rows} rows of {path} are too long and are {done}")
    return counts


def _check_tokenizer(model_path: str | None) -> None:
    """Raises:
    ConfigError: a folder that is here has no file that a tokenizer is read from, going by the names.
    """
    folder = None if model_path is None else Path(model_path)
    if folder is not None and folder.is_dir() and not any(_TOKENIZER.search(file.name) for file in folder.iterdir()):
        raise ConfigError(
            f"model.path={folder} has no tokenizer; copy its files (tokenizer.json, for instance) into that folder"
        )


def _plain(item: Item) -> Item:
    """Without what only its reward wants."""
    assert isinstance(item, Prompt)
    return Prompt(index=item.index, text=item.text, messages=item.messages)


def note(text: str) -> None:
    """Print a note about a start."""
    print(f"note: {text}", file=sys.stderr)


def _ask(request: _ScanRequest, path: str) -> _ScanAnswer | _UnreadableModel:
    with start_child(__name__, None, _MESSAGE_S) as child:
        try:
            child.pipe.send(request)
            return _answer(child.pipe, path, len(request.rows))
        except (EOFError, OSError) as error:
            status = child.status(1)
            raise RunError(f"the process that checks the rows of {path} has ended ({status})") from error


def _answer(pipe: ChildPipe, path: str, rows: int) -> _ScanAnswer | _UnreadableModel:
    told = time.monotonic()
    while pipe.poll(_LIMIT_S):
        message = pipe.recv()
        if isinstance(message, TrinityError):
            raise message
        if not isinstance(message, int):
            return cast("_ScanAnswer | _UnreadableModel", message)
        if time.monotonic() - told > _TELL_S and message < rows:
            told = time.monotonic()
            note(f"looking through {path}: {message} of {rows} rows")
    raise RunError(f"the process that checks the rows of {path} did not report for {_LIMIT_S:.0f} s")


# ---- the child


def serve(descriptor: int) -> None:
    """Run as the child: look at the rows of one request, telling after every thousand how many are done."""
    os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with Connection(descriptor) as connection:
        request: _ScanRequest = connection.recv()
        if not request.trust_remote_code:
            # a tokenizer needs none, and it takes seconds to load
            sys.modules["torch"] = None  # type: ignore[assignment]
        answer: object
        try:
            answer = _look(request, connection.send)
        except TrinityError as error:
            answer = error
        connection.send(answer)


def _look(request: _ScanRequest, tell: Callable[[int], None]) -> _ScanAnswer | _UnreadableModel:
    from trinity_sync.tasks.encoding import PairEncoder, PromptEncoder

    try:
        tokens = _tokens(request)
    except (OSError, ValueError) as error:
        return _UnreadableModel(in_one_line(error))
    _check_model(request, tokens)
    notes = [tokens.difference] if tokens.difference else []
    if request.prompts and (noisy := noise(tokens.config.to_dict())):
        notes.append(
            f"the model's config has {noisy}: the trainer computes with it (backend=megatron leaves it out), and the "
            "explorers do not; 0 in its config.json turns it off"
        )
    if not request.rows:
        return _ScanAnswer(None, [], notes)
    kind = PromptEncoder if request.prompts else PairEncoder
    encoder = cast(_Encoder, kind.of_task(request.task, tokens))
    least = _at_least(request, encoder)
    lengths = dict(least)
    left = [number for number in range(len(request.rows)) if number not in least]
    for start in range(0, len(left), _CHUNK):
        numbers = left[start : start + _CHUNK]
        places, items = zip(*(request.rows[number] for number in numbers), strict=True)
        try:
            lengths |= zip(numbers, encoder.lengths(items, places), strict=True)
        except RunError as error:
            raise ConfigError(str(error)) from error
        tell(len(lengths))
    unended = encoder.unended(cast(Any, request.rows[0][1])) if isinstance(encoder, PairEncoder) else None
    notes += [unended] if unended else []
    return _judged(request, encoder, [lengths[number] for number in range(len(request.rows))], notes)


def _check_model(request: _ScanRequest, tokens: ModelTokens) -> None:
    """Check that trainer and explorers choose the same class and attention. The config may come from the hub."""
    fields = tokens.config.to_dict()
    on_cpu = request.vllm_on_cpu
    if on_cpu is not None and (problem := vllm_problem(fields, on_cpu=on_cpu)):
        raise ConfigError(f"explorer.kind: vLLM {problem}")
    if request.model_path is None:
        return
    if problem := class_problem(fields):
        raise ConfigError(f"model.path is {request.model_path}, whose {problem}")
    check_attention(fields, request.attention)
    if request.prompts:
        tokens.needed_ends(request.model_path)


def _at_least(request: _ScanRequest, encoder: _Encoder) -> dict[int, int]:
    """Numbers of the rows that are too long however they are divided into tokens, and how many these have at least:
    to tokenise megabytes would take minutes.
    """
    if encoder.limit is None:
        return {}
    found = {}
    for number, (place, item) in enumerate(request.rows):
        characters = _characters(item)
        if characters <= encoder.limit * _TOKEN_CHARACTERS:
            continue
        if request.task.get("too_long", "refuse") == "truncate":
            continue
        if request.task.get("too_long", "refuse") != "filter":
            raise ConfigError(
                f"{place} has {characters} characters, for which {encoder.limit} tokens are too few; "
                f"{encoder.limit_text}. Shorten or remove it, or set task.too_long=filter to leave such rows out"
            )
        found[number] = characters // _TOKEN_CHARACTERS
    return found


def _characters(value: object) -> int:
    """Of all texts in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Prompt):
        return _characters(value.text if value.messages is None else value.messages)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def _tokens(request: _ScanRequest) -> ModelTokens:
    from trinity_sync.models.tokens import ModelTokens, read_tokens

    if request.model_path is None:
        from trinity_sync.models.architecture import architecture_config, character_tokenizer

        config = architecture_config(request.architecture)
        return ModelTokens(character_tokenizer(config.vocab_size), config)
    return read_tokens(request.model_path, trust_remote_code=request.trust_remote_code)


def _judged(request: _ScanRequest, encoder: _Encoder, lengths: Sequence[int], notes: list[str]) -> _ScanAnswer:
    """Apply the policy to rows with these lengths in tokens."""
    policy = str(request.task.get("too_long", "refuse"))
    limit = encoder.limit
    too_long = [number for number, length in enumerate(lengths) if limit is not None and length > limit]
    longest, found = max(lengths), f"{len(too_long)} of {len(lengths)} rows are too long"
    if too_long and policy == "refuse":
        raise ConfigError(
            f"{request.rows[too_long[0]][0]} has {lengths[too_long[0]]} tokens; {encoder.limit_text}. {found}, the "
            f"longest has {longest} tokens; set {encoder.remedy(longest)}, task.too_long=filter to leave them out, or "
            f"task.too_long=truncate to cut {encoder.cut}"
        )
    if len(too_long) == len(lengths) and policy == "filter":
        raise ConfigError(f"task.too_long is filter, but all {len(lengths)} rows are too long; {encoder.limit_text}")
    return _ScanAnswer(RowCounts(len(lengths), len(too_long), longest, policy), too_long, notes)
