"""Limits of a saved configuration, since another user may have made the folder that a resume reads. It may name the
classes of our option files, our tasks, rewards and trackers, and listed settings of engines. This user's record on this
host (`FolderRecord`) is trusted too. Everything else the user confirms on the command line of the resume: by the value
itself, or by the package with `--allow-target`.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trinity_sync.config.composition import (
    PATHS,
    RESUME_FROM,
    as_written,
    compose,
    inspected,
    is_name,
    override_texts,
)
from trinity_sync.config.lookup import ModuleSource, module_source, own_options, own_targets_of
from trinity_sync.config.overrides import REWARD, as_value, long_form, quote
from trinity_sync.config.user_record import FILE, NOTHING, FolderRecord, record
from trinity_sync.errors import ConfigError
from trinity_sync.host.masking import MASK, masked, masked_override, shown
from trinity_sync.host.references import Settings, Value

SETTINGS_FOLDER = ".hydra"
"""The folder of saved settings in a run's folder."""
_REWARDS = "trinity_sync.tasks.rewards"
OWN = {
    "task": (
        "trinity_sync.tasks.conversations.ConversationsTask",
        "trinity_sync.tasks.copy_digits.CopyDigits",
        "trinity_sync.tasks.jsonl.JsonlTask",
        "trinity_sync.tasks.pairs.PairsTask",
        "trinity_sync.tasks.verl.VerlTask",
        *(f"{_REWARDS}.{name}" for name in ("contains_answer", "exact_match", "numeric_match", "WeightedSum")),
    ),
    "tracker": (
        "trinity_sync.tracking.mlflow.MlflowTracker",
        "trinity_sync.tracking.swanlab.SwanlabTracker",
        "trinity_sync.tracking.tensorboard.TensorBoardTracker",
        "trinity_sync.tracking.trackio.TrackioTracker",
        "trinity_sync.tracking.wandb.WandbTracker",
    ),
}
"""Our tasks, rewards and trackers that saved settings may name, by group. Never add one with an argument that names
code, except by the keys of `_LETS_RUN`.
"""

_RUN = ("_target_", "class", "()")
"""Keys whose value Hydra, or Python's logging that it sets up, calls."""
_IMPORTED = ("pkg://", "ext://")
_OF_MODELS = "trust_remote_code"
_MODELS = ("model.path", "model.lora.path", "algorithm.kl.reference", RESUME_FROM)
"""Settings that name a model, which may have code."""
_LETS_RUN = {
    _OF_MODELS: "that comes with a model",
    "function_path": "of that file",  # for a task with verl's rewards
    "function_name": "of a file",
}
"""Keys anywhere that let code run, and which code."""
_KEY = "explorer.key_env"
"""A setting that names a variable whose value is sent to a server."""
_VERLS = ("function_name", "compute_score")
"""verl's default name of the function."""
_ENGINES = {
    # of vLLM's AsyncEngineArgs
    "explorer.engine": re.compile(
        r"""async_scheduling|block_size|cpu_offload_gb|disable_(?:cascade_attn|custom_all_reduce|log_stats)|watermark
        |disable_hybrid_kv_cache_manager|enable_(?:chunked_prefill|expert_parallel|prefix_caching|sleep_mode)
        |(?:compilation_config\.)?(?:cudagraph_capture_sizes|max_cudagraph_capture_size)|gpu_memory_utilization
        |kv_cache_memory_bytes|long_prefill_token_threshold|max_(?:logprobs|num_batched_tokens|num_scheduled_tokens)
        |max_parallel_loading_workers|num_gpu_blocks_override|scheduler_reserve_full_isl|stream_interval""",
        re.VERBOSE,
    ),
    # of verl's engine configs, and of megatron-core's DistributedDataParallelConfig and TransformerConfig below them
    "backend.overrides": re.compile(
        r"""distrib_optim_fully_reshardable_mem_efficient|entropy_checkpointing|forward_prefetch|full_determinism
        |offload_policy|pad_bshd_to_minibatch_max|pad_to_length(?:_bucket)?|reshard_after_forward|use_orig_params
        |use_(?:distributed_optimizer|fused_kernels|no_sync_for_gradient_accumulation|remove_padding|torch_compile)
        |virtual_pipeline_model_parallel_size|wrap_policy\.min_num_params
        |override_ddp_config\.(?:average_in_collective|bucket_size|grad_reduce_in_fp32|overlap_(?:grad_reduce|param_gather))
        |override_transformer_config\.(?:apply_rope_fusion|attention_dropout|attention_softmax_in_fp32|bias_\w+_fusion
            |deterministic_mode|gradient_accumulation_fusion|hidden_dropout|masked_softmax_fusion|persist_layer_norm
            |moe_(?:aux_loss_coeff|grouped_gemm|permute_fusion|router_bias_update_rate|z_loss_coeff)
            |recompute_num_layers)""",
        re.VERBOSE,
    ),
}
"""Arguments of engines that saved settings may give: numbers and switches that name no code, file or address."""
_WRITTEN = (
    "checkpoint.dir",
    "checkpoint.mirror",
    "checkpoint.mirror_options",
    "cluster.address",
    "cluster.temp_dir",
    "explorer.url",
    "sync.shm_dir",
    "sync.store",
)
"""Keys, and prefixes of keys, of places that a run writes and of addresses that it calls."""
_READ = frozenset({*PATHS, RESUME_FROM} - set(_WRITTEN))
_OF_TRACKERS = frozenset({"_target_", "experiment", "flush_s", "names", "project", "tags", "timeout_s"})
"""Keys of trackers that name no place."""
_OFFLINE = ("offline", "local", "disabled")
_ELSEWHERE = re.compile(r"\s*(?:/|~|\.\.?/|[A-Za-z][\w+.-]*://)")
"""The start of a text that names a place, at any key."""
_HARMLESS = re.compile(r"\$\{(?:(?:now|sum|once):[^${}]*|fitting_\w+:\{?[^${}]*\}?|[^:${}\0]*)\}")
"""Interpolations that give text, a number, or another part of the configuration. Others, such as `oc.create`, may
create a `_target_`; `oc.env` may read a secret. NUL stands for an interpolation as an argument; names may not be
interpolations.
"""
_UNKNOWN = object()
_NO_LINK = "the file itself in place of the link "
_LOOKED_AT = (".hydra", "logs", "checkpoints", "checkpoints/.staging", "checkpoints/.versions")
_STEPS = tuple(
    f"checkpoints/{prefix}"
    for prefix in ("global_step_", "abandoned-global_step_", ".trash-", ".condemned-", ".replaced-")
)
_DEEPEST = 32
_MOST_SHOWN = 8
_OF_SWEEPS = {
    ("hydra.launcher._target_", "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"),
    ("hydra.launcher._target_", "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"),
    ("hydra.sweeper._target_", "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"),
    ("hydra.sweeper.sampler._target_", "optuna.samplers.TPESampler"),
}
"""Classes in our options for sweeps, by key. A single run uses none."""
_RECORD = "hydra.job.override_dirname"
"""Written by Hydra from the overrides, like `hydra.overrides`."""


Places = Literal["none", "written", "all"]
"""Which places outside a run's folder the user must trust."""


class Doubt(NamedTuple):
    """A saved value that the user must trust."""

    key: str
    text: object  # the value as it is written
    signed: object  # its form in the user's record; None: it is never recorded
    why: str  # the reason, for the error
    again: str  # the argument to add on the command line
    target: str | None = None  # the dotted name of an import
    comes_to: object = None  # the resolved value, if it differs from the text


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The targets and places that the user trusts when saved settings are used again."""

    where: Path  # the folder of the run or sweep, or a bundle
    started_in: Path = Path()  # the folder from which relative paths count
    new: Sequence[str] = ()  # the user's new overrides
    allowed: Sequence[str] = ()  # packages or dotted names that may also be run
    recorded: FolderRecord = NOTHING  # this user's record of the folder on this host
    places: Places = "all"  # which places outside the folder need trust

    @cached_property
    def given(self) -> frozenset[tuple[str, object]]:
        """Keys and values on the command line itself."""
        return frozenset(_given(self.new))

    def gives(self, key: str) -> bool:
        """Return whether a place is on the command line itself; null does not count."""
        return any(key == given and value is not None for given, value in self.given)

    def module_folders(self) -> dict[str, Path]:
        """Return the folders of trusted modules that an import would not find, by module."""
        folders = {}
        for name in {*map(_top, self._vouched()), *self.recorded.modules}:
            with suppress(OSError):
                if module_source(name) is None and (place := module_source(name, self._candidates(name))) is not None:
                    folders[name] = Path(place.folder)
        return folders

    def _vouched(self) -> list[str]:
        return [*self.allowed, *(value for key, value in self.given if _is_target(value, key))]

    def _candidates(self, module: str) -> list[Path]:
        recorded = self.recorded.folder_of(module)
        here = [Path.cwd(), self.started_in] if module in map(_top, self._vouched()) else []
        return [*([recorded] if recorded else []), *here]

    def accepts(self, doubt: Doubt) -> bool:
        """Return whether the user vouches for a value."""
        if (doubt.key, doubt.text) in self.given or (doubt.key, doubt.signed) in self.given:
            return True
        if any(doubt.key.startswith(f"{key}.") for key, text in self.given if "${" in str(text)):
            return True  # the value of a reference on the command line
        if doubt.signed is None or not self.recorded.holds("setting", doubt.key, doubt.signed):
            return False
        module = _top(doubt.target or "")
        with suppress(OSError):
            place = module_source(module, self._candidates(module))
            return not module or (place is not None and self.recorded.holds("module", module, place.digest))
        return False

    def refuse(self, doubts: Iterable[Doubt]) -> None:
        """Raise a `ConfigError` if there is a value that the user does not vouch for."""
        refused = sorted((one for one in doubts if not self.accepts(one)), key=lambda one: one.target is None)
        if not refused:
            return
        first, others = refused[0], list(dict.fromkeys(doubt.again for doubt in refused[1:]))
        changed = first.target is not None and self.recorded.holds("setting", first.key, first.signed)
        value = masked(first.comes_to or first.text, first.key.rpartition(".")[2])
        told = [f"{first.key} is {_words(value)} in the saved settings of {self.where}"]
        told += ["and its code has changed since the run recorded it"] * changed
        more = f"; and for the others: {' '.join(others[:_MOST_SHOWN])}" if others else ""
        cut = " ..." * (len(others) > _MOST_SHOWN)
        raise ConfigError(f"{', '.join([*told, first.why])}; where you trust it, add {first.again}{more}{cut}")


@contextmanager
def only_trusted_places(trust: Trust) -> Iterator[None]:
    """Within the block, Hydra reads option files only from folders and from trusted packages, which it imports. Errors
    as of `only_trusted`.
    """
    with inspected(place=partial(_check_place, trust)):
        yield


@contextmanager
def only_trusted(overrides: Sequence[str], trust: Trust) -> Iterator[None]:
    """Within the block, Hydra refuses settings, and places of option files, that are neither allowed for every run nor
    trusted by the user.
    """
    ours = _shipped()

    def check(cfg: DictConfig) -> None:
        trust.refuse(_doubts(cfg, ours, overrides, trust))

    with inspected(place=partial(_check_place, trust), composed=check):
        yield


def saved_references(cfg: DictConfig) -> Iterator[Doubt]:
    """Yield references in saved settings that read the environment or create new values."""
    return _references(cfg, _shipped(), ())


def record_of(composed: Iterable[DictConfig], hydra: DictConfig, trust: Trust, *, sweep: bool = False) -> str | None:
    """Return the record of a starting run or sweep: all values for which a resume would need trust; None: this user has
    no key.
    """
    every = (doubt for cfg in composed for doubt in _of_run(cfg, cfg.get("hydra") or hydra, trust))
    doubts = [doubt for doubt in every if sweep or not doubt.key.endswith(_OF_MODELS)]
    modules: dict[str, ModuleSource] = {}
    for name in {_top(doubt.target) for doubt in doubts if doubt.target is not None}:
        with suppress(OSError):
            if (place := module_source(name, [trust.started_in])) is not None:
                modules[name] = place
    return record(((doubt.key, doubt.signed) for doubt in doubts if doubt.signed is not None), modules)


def saved_texts(
    cfg: DictConfig, used: DictConfig, trust: Trust, *, saved_by_hydra: bool, made: Mapping[str, object]
) -> dict[str, str]:
    """Return the files of a run's `.hydra/` by name: its settings as Hydra composed them (`cfg`), unless Hydra has
    saved them, and this user's record of them and of those that the run uses. The settings come last: if only some
    files are written, the next resume shows the difference. `made`: the values that the start gave to settings.
    """
    hydra = copy.deepcopy(HydraConfig.instance().cfg)
    assert isinstance(hydra, DictConfig)
    OmegaConf.set_readonly(hydra.hydra, False)
    hydra.hydra.output_subdir = SETTINGS_FOLDER
    hydra.hydra.runtime.cwd = str(trust.started_in)
    if made:
        others = [text for text in override_texts(hydra.hydra) if text.lstrip("+").partition("=")[0] not in made]
        hydra.hydra.overrides.task = [*others, *(f"{key}={as_value(value)}" for key, value in made.items())]
    OmegaConf.set_readonly(hydra.hydra, True)
    parts = {"hydra.yaml": hydra, "overrides.yaml": hydra.hydra.overrides.task, "config.yaml": cfg}
    texts = {} if saved_by_hydra else {name: OmegaConf.to_yaml(part) for name, part in parts.items()}
    composed = [cfg] if OmegaConf.to_container(used) == OmegaConf.to_container(cfg) else [cfg, used]
    record = record_of(composed, hydra.hydra, trust)
    return texts if record is None else texts | {FILE: record}  # an unreadable key keeps the earlier record


def asked_again(run: Path, used: Mapping[str, str | None]) -> list[str]:
    """Return the arguments, besides the folder, that a resume of a run needs, quoted for a shell; empty if the settings
    cannot be read.
    """
    with suppress(Exception):  # the resume itself reports the problem
        hydra = OmegaConf.load(run / ".hydra" / "hydra.yaml").hydra
        cfg = cast(DictConfig, OmegaConf.load(run / ".hydra" / "config.yaml"))
        for key, place in used.items():
            OmegaConf.update(cfg, key, place)
        trust = Trust(where=run, started_in=Path(hydra.runtime.cwd), recorded=FolderRecord.read(run))
        refused = [doubt for doubt in _of_run(cfg, hydra, trust) if not trust.accepts(doubt)]
        return list(dict.fromkeys(doubt.again for doubt in refused if not doubt.again.startswith(_NO_LINK)))
    return []


def _of_run(cfg: DictConfig, hydra: DictConfig, trust: Trust) -> Iterator[Doubt]:
    whole = cfg.copy()
    OmegaConf.set_readonly(whole, False)
    with open_dict(whole):
        whole.hydra = hydra
    return _doubts(whole, _shipped(), override_texts(hydra), trust)


@dataclass(frozen=True, kw_only=True)
class _ShippedDefaults:
    """The values of our own option files: interpolations (key, text); of Hydra's own settings the outputs by key and
    the called names; the other settings by key.
    """

    interpolated: frozenset[tuple[str, str]]
    written: Mapping[str, object]
    named: frozenset[str]
    settings: Mapping[str, object]


@cache
def _shipped() -> _ShippedDefaults:
    state = GlobalHydra.instance()
    around = state.hydra  # of a starting run
    state.clear()
    try:
        ours = compose(hydra=True)
    finally:
        state.hydra = around
    hydra = _mapping(_mapping(as_written(ours))["hydra"])
    return _ShippedDefaults(
        interpolated=frozenset((key, text) for key, text, _ in _interpolated(ours)),
        written=dict(_written(hydra)),
        named=frozenset(name for _, name in _named(hydra, "")),
        settings={key: value for key, _, value in _resolved(ours, "")},
    )


def _check_place(trust: Trust, place: str) -> None:
    scheme, _, name = place.rpartition("://")
    given = {value for key, value in trust.given if key.startswith("hydra.searchpath.")}
    if scheme not in ("", "file") and place not in given:
        trust.refuse(_imported("hydra.searchpath", name.replace("/", ".").strip("."), trust.allowed))


def _doubts(cfg: DictConfig, ours: _ShippedDefaults, overrides: Sequence[str], trust: Trust) -> Iterator[Doubt]:
    """Yield everything that the user must trust in settings, with Hydra's own below `hydra`."""
    yield from _references(cfg, ours, overrides)
    hydra = _mapping(_mapping(as_written(cfg))["hydra"])
    for key, name in _named(hydra.pop("searchpath", None), "hydra.searchpath"):  # see `only_trusted_places`
        if (key, name) not in trust.given:
            yield from _imported("hydra.searchpath", name, trust.allowed)
    job = _mapping(hydra["job"])
    for key, value in _leaves(job.get("env_set", {}), "hydra.job.env_set"):
        yield _doubt(key, value, "which programs that are started would heed", value)
    for key, value in _written(hydra):
        if ours.written.get(key) != value:
            yield _doubt(key, value, "which says what is written, and where", value)
    if job.get("chdir"):
        yield _doubt("hydra.job.chdir", True, "so that the run's processes would look for modules there", True)
    for key, name in _named(hydra, "hydra"):
        if name not in ours.named and (key, name) not in _OF_SWEEPS:
            yield from _imported(key, name, trust.allowed)
    for key, text, value in _resolved(cfg, ""):
        yield from _of_setting(cfg, key, text, value, ours, trust)
    if trust.places == "all":
        yield from _links(trust)


def _of_setting(
    cfg: DictConfig, key: str, text: object, value: object, ours: _ShippedDefaults, trust: Trust
) -> Iterator[Doubt]:
    last = key.rpartition(".")[2]
    known = value is not _UNKNOWN
    value = value if known else text
    if _is_target(value, key):
        if value != text:
            yield _doubt(key, text, "which may come to any code", text)
        yield from _target(key, _dotted(value), trust.allowed)
    elif last in _LETS_RUN and value and (last, value) != _VERLS:
        signed = _models_signed(cfg, trust) if last == _OF_MODELS else value
        signed = _file_signed(trust.started_in, value) if last == "function_path" else signed
        yield _doubt(key, text, f"which lets code run {_LETS_RUN[last]}", signed)
    elif value is None or ours.settings.get(key, _UNKNOWN) == value:
        return
    elif key == _KEY:
        yield _doubt(key, text, "which has a part of your environment sent to a server", value)
    elif engine := next((name for name in _ENGINES if key.startswith(f"{name}.")), None):
        inner = re.sub(r"\.\d+(?=\.|$)", "", key.removeprefix(f"{engine}."))
        if not _ENGINES[engine].fullmatch(inner) or not isinstance(value, int | float):
            yield _doubt(key, text, "which may have the engine run code, or read or call a place", value)
    elif known and trust.places != "none":
        yield from _of_place(key, text, value, trust)


def _of_place(key: str, text: object, value: object, trust: Trust) -> Iterator[Doubt]:
    """Yield the doubt about a setting that names a place outside the run's folder."""
    written = any(f"{key}.".startswith(f"{name}.") for name in _WRITTEN) or _of_tracker(key, value)
    named_by = re.sub(r"\.\d+$", "", key)  # of a list
    looks = isinstance(value, str) and _ELSEWHERE.match(value) is not None
    url = isinstance(value, str) and "://" in value
    if not (written or (looks and url) or (trust.places == "all" and (named_by in _READ or looks))):
        return
    if isinstance(value, str) and not url and (looks or named_by in PATHS or key == RESUME_FROM):
        place = trust.started_in / os.path.expanduser(value)  # noqa: PTH111 - the name of an unknown user stays
        named = not looks and is_name(key, place)
        if (named and key == "model.shapes") or (not named and _inside(place, trust.where)):
            return  # a model with known shapes, or a place in the run's folder
        value = value if named else os.path.abspath(place)  # noqa: PTH100 - links stay
    told = shown(str(value))
    signed = _here(told, trust.where) if written else told
    refers = "${" in str(text)
    found = _doubt(key, text if refers else value, "a place outside the run's folder", signed)
    yield found._replace(text=text, comes_to=None if refers else told)


def _of_tracker(key: str, value: object) -> bool:
    """Return whether a setting says where a tracker sends data; all keys do that are not known to be harmless."""
    group, _, below = (*key.split(".", 3), "", "")[:3]
    named = below in _OF_TRACKERS or (below == "mode" and value in _OFFLINE)
    return group == "tracker" and not named


def _links(trust: Trust) -> Iterator[Doubt]:
    """Yield links in a run's folder that lead out of it, since writes would follow them. A link to a step, such as an
    archived one, is only read.
    """
    run, why = trust.where, "a link that leads out of the run's folder"
    try:
        parts = [part for part in (run, *(run / name for name in _LOOKED_AT)) if part.is_dir()]
        links = [found for part in parts for found in sorted(part.iterdir()) if found.is_symlink()]
    except OSError as error:
        raise ConfigError(f"{error.filename or run} cannot be read: {error.strerror or error}") from error
    for found in links:
        name, place = str(found.relative_to(run)), os.path.realpath(found)
        if _inside(found, run) or name.startswith(_STEPS):
            continue
        if name != "checkpoints":
            yield Doubt(name, place, _here(place, run), why, f"{_NO_LINK}{shlex.quote(name)}")
        elif not trust.gives("checkpoint.dir"):
            yield _doubt("checkpoint.dir", place, why, _here(place, run))


def _here(place: str, run: Path) -> str | None:
    """Return the recorded form of a written place: with the folder's inode and owner, so that a copy of the folder does
    not count and two runs never write to the place. A copy on another file system may have the same inode, but has
    another owner.
    """
    with suppress(OSError):
        folder = run.stat()
        return f"{place} of {folder.st_uid} {folder.st_ino}"
    return None


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _models_signed(cfg: DictConfig, trust: Trust) -> str | None:
    """Return the recorded form of a run's model folders; None: one may lie in the run's folder, which other users may
    have filled.
    """
    named = {key: text if value is _UNKNOWN else value for key, text, value in _resolved(cfg, "") if key in _MODELS}
    places = {key: trust.started_in / os.path.expanduser(str(name)) for key, name in named.items() if name is not None}  # noqa: PTH111
    if any(_inside(place, trust.where) for place in places.values()):
        return None
    return _here(str({key: os.path.realpath(place) for key, place in places.items()}), trust.where)


def _file_signed(started_in: Path, value: object) -> str | None:
    """Return a file's path and the digest of its bytes; None: there is no such file."""
    try:
        path = started_in / Path(str(value)).expanduser()
        return f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    except (OSError, ValueError, RuntimeError):
        return None


def _doubt(key: str, text: object, why: str, signed: object) -> Doubt:
    words = _words(text)
    plain = not isinstance(text, str) or re.fullmatch(r"[\w./-]+", words)
    again = masked_override(f"{key}={words if plain else quote(words)}")
    return Doubt(key, text, signed, why, shlex.quote(f"{key}=${{oc.env:NAME}}" if MASK in again else again))


def _words(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(str(value))


def check_saved_target(key: str, name: str, allowed: Sequence[str], where: Path) -> None:
    """Refuse a class that a run's settings name, unless it is one of ours for that key, or the user vouches for it."""
    Trust(where=where, allowed=allowed, recorded=FolderRecord.read(where)).refuse(_target(key, name, allowed))


def _target(key: str, name: str, allowed: Sequence[str]) -> Iterator[Doubt]:
    # outside its group a class may get dangerous arguments, such as a model's code to run
    group = key.partition(".")[0]
    if name not in (*own_targets_of(group), *OWN.get(group, ())):
        yield from _imported(key, name, allowed)


def _imported(key: str, name: str, allowed: Collection[str]) -> Iterator[Doubt]:
    # an import of our module is not ours: trinity_sync.tasks.rows.json.loads
    real = _home(name) if _below(name, allowed) else None
    if real is None or not _below(real, (*allowed, _REWARDS)):  # our object may have a name in a user's package
        ours = name.startswith("trinity_sync.")  # never advise to allow this whole program
        package = real or (name.rpartition(".")[0] if ours else _top(name))
        yield Doubt(key, name, name, "which would be imported and run", f"--allow-target {shlex.quote(package)}", name)


def _references(cfg: DictConfig, ours: _ShippedDefaults, overrides: Sequence[str]) -> Iterator[Doubt]:
    for key, text, value in _interpolated(cfg):
        if (key, text) in ours.interpolated or key == _RECORD:
            continue
        if key.startswith("hydra.overrides.") and text in overrides:
            continue
        left, before = text, ""
        while left != before:
            left, before = _HARMLESS.sub("\0", left), left
        # Hydra's own settings resolve to more in the run than here; unresolvable others are refused as wrong
        unknown = value is _UNKNOWN and key.startswith("hydra.")
        # resolved text with "${" would be resolved again by Hydra
        if "${" in left or unknown or (isinstance(value, str) and "${" in value):
            reads = "oc.env" in left and left.count("${") == left.count("${oc.env")
            why = "which reads your environment" if reads else "and what that comes to might be run"
            yield _doubt(key, text, why, text)


def _below(name: str, packages: Collection[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _home(name: str) -> str:
    """Return the module in which an object was made; its name if that is unknown: then it cannot be run."""
    try:
        found = get_object(name)
    except Exception:
        return name
    while isinstance(found, partial):
        found = found.func
    return str(getattr(found, "__module__", None) or getattr(found, "__name__", None) or type(found).__module__)


def _is_target(value: object, key: str) -> TypeGuard[str]:
    return isinstance(value, str) and (key.rpartition(".")[2] in _RUN or value.startswith(_IMPORTED))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _named(value: Value, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, dotted name) of every import, at any depth."""
    return ((place, _dotted(name)) for place, name in _leaves(value, key) if _is_target(name, place))


def _dotted(name: str) -> str:
    return name.partition("://")[2].replace("/", ".") or name


def _interpolated(cfg: DictConfig) -> Iterator[tuple[str, str, object]]:
    """Yield (key, text, value) of all interpolations, at any depth; the value is `_UNKNOWN` if it cannot be resolved
    now.
    """

    def below(node: DictConfig | ListConfig, key: str) -> Iterator[tuple[str, str, object]]:
        for part, text in _parts(as_written(node)):
            place = f"{key}.{part}" if key else str(part)
            if isinstance(text, dict | list):
                yield from below(node[part], place)  # type: ignore[index]
            elif isinstance(text, str) and "${" in text:
                try:
                    yield place, text, node[part]  # type: ignore[index]
                except OmegaConfBaseException:
                    yield place, text, _UNKNOWN

    yield from below(cfg, "")


def _resolved(node: DictConfig | ListConfig, key: str, depth: int = 0) -> Iterator[tuple[str, object, object]]:
    """Yield (key, text, value) of all settings but Hydra's own, at any depth, also behind interpolations."""
    if depth > _DEEPEST:
        raise ConfigError(f"{key[:60]}... lies more than {_DEEPEST} levels deep; write it out")
    for part, text in _parts(as_written(node)):
        if (key, part) == ("", "hydra"):
            continue
        place = f"{key}.{part}" if key else str(part)
        try:
            value = node[part]  # type: ignore[index]
        except OmegaConfBaseException:
            value = None if text == "???" else _UNKNOWN
        if isinstance(value, DictConfig | ListConfig) and not OmegaConf.is_missing(node, part):
            yield from _resolved(value, place, depth + 1)
        else:
            yield place, text, value


def _written(hydra: Settings) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of the settings of files that Hydra and Python's logging write."""
    for part in ("job_logging", "hydra_logging", "output_subdir"):
        yield from _leaves(hydra.get(part), f"hydra.{part}")


def _mapping(value: Value) -> Settings:
    if not isinstance(value, dict):  # a reference in place of Hydra's settings could not be looked into
        raise ConfigError(f"Hydra's own settings have {value!r} where a mapping belongs")
    return value


def _parts(value: Value) -> Iterable[tuple[str | int, Value]]:
    """Return the parts of a mapping by key, or of a list by index; nothing of other values."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def _leaves(value: Value, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list):
        for part, inner in _parts(value):
            yield from _leaves(inner, f"{key}.{part}" if key else str(part))
    else:
        yield key, value


def _given(new: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of the command line itself; a choice of an option counts only by our option's content."""
    for override in OverridesParser.create().parse_overrides(list(new)):
        key, value = override.get_key_element().lstrip("+~"), cast("Value", override.value())
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line} is a sweep; give one value here")
        for form in (value, long_form(value) if key == REWARD else None):
            yield from _named(form, key)
            yield from _leaves(form, key)
        for name in value if isinstance(value, list) else [value]:  # for our options, the content of their files
            if isinstance(name, str) and "." not in key and (option := own_options(key).get(name)):
                yield from _leaves(option, f"tracker.{name}" if key == "tracker" else key)
