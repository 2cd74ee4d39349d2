"""verl's platform plug-in for machines without an accelerator.

verl 0.9.1 imports this module in every process in which `VERL_USE_EXTERNAL_MODULES` names it, and uses the platform
when `VERL_PLATFORM=cpu` (see `platform_env`). The engines, their loss and their checkpoints are verl's own and
unchanged; this module only answers, for a CPU, verl's questions about the accelerator. On a CUDA machine it is never
loaded.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed.fsdp._init_utils
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuDeviceId(str):
    """The device id of the CPU, in the three forms that verl uses.

    `tensor.to(id)` and FSDP's `device_id` need "cpu"; `torch.device(f"{name}:{id}")` needs "cpu:0", hence its format
    "0".
    """

    __slots__ = ()

    def __new__(cls) -> _CpuDeviceId:
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"


class _CpuDeviceModule(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls unconditionally."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing: there is no device cache, counter or context."""


def _zero(*_: object, **__: object) -> int:
    """Return 0: a CPU has no device memory; the run's own records measure resident memory."""
    return 0


def _device_module() -> types.ModuleType:
    module = _CpuDeviceModule("trinity_sync_cpu_device")
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize"):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _zero)
    vars(module).update(
        mem_get_info=lambda *_, **__: (0, 0),
        get_device_name=lambda *_, **__: "CPU",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The properties of a machine without an accelerator."""

    _device_id = _CpuDeviceId()
    _module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> _CpuDeviceId:
        return self._device_id

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: object) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "TRINITY_SYNC_VISIBLE_CPUS"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, object]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _accept_module_states_on_cpu(module_states: object) -> None:
    """Replace FSDP1's check for `sync_module_states`, which refuses parameters on a CPU, though gloo can broadcast
    them.
    """


torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states = _accept_module_states_on_cpu
