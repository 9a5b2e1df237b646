"""A process that takes itself to have a GPU of some architecture, far enough to compile for it.

The packages ask the driver what to compile for. `pretend` answers in its place; it leans on private names of
the pinned versions, so it belongs to a process that ends after its test. Nothing is launched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

MULTIPROCESSORS = {"sm_90": 132, "sm_100": 148, "sm_120": 170}

Launches = list[tuple[str, int]]
"""Kernels that would have been launched, with how many arguments."""


def environment(arch: str, folder: str = "") -> dict[str, str]:
    """Variables that must be there before a package is imported; cubins go to `folder`."""
    variables = {
        "FLASH_ATTENTION_ARCH": f"{arch}a",
        "CUTE_DSL_ARCH": f"{arch}a",
        "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[arch]),
    }
    if folder:
        variables |= {"CUTE_DSL_DUMP_DIR": folder, "CUTE_DSL_KEEP_CUBIN": "1"}
    return variables


class Hardware:
    """cutlass.utils.HardwareInfo, which asks the driver."""

    def __init__(self, *_: Any) -> None:
        self.count = MULTIPROCESSORS[os.environ["CUTE_DSL_ARCH"].rstrip("a")]

    def get_max_active_clusters(self, size: int, *_: Any) -> int:
        return self.count // size

    def get_device_multiprocessor_count(self) -> int:
        return self.count

    def get_l2_cache_size_in_bytes(self) -> int:
        return 50 << 20


class Compiler:
    """cute.compile, whose results note that they were called; without `real` nothing is compiled at all."""

    def __init__(self, real: Any, launches: Launches) -> None:
        self.real, self.launches = real, launches

    def __getitem__(self, options: Any) -> Compiler:
        return Compiler(self.real and self.real[options], self.launches)

    def __call__(self, kernel: Any, *arguments: Any, **options: Any) -> Callable[..., None]:
        if self.real:
            self.real(kernel, *arguments, **options)
        name = getattr(kernel, "__name__", type(kernel).__name__)
        return lambda *arguments: self.launches.append((name, len(arguments)))


@contextmanager
def pretend(arch: str, *, compiles: bool) -> Iterator[Launches]:
    """Be a machine with a GPU of this architecture whose kernels are compiled, or only asked for."""
    import cudnn.tensor_adapter
    import cutlass.base_dsl.runtime.cuda
    import cutlass.utils
    import torch
    from cutlass import cute
    from torch._subclasses.fake_tensor import FakeTensorMode

    capability = divmod(int(arch.removeprefix("sm_")), 10)
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS[arch], total_memory=80 << 30)
    launches: Launches = []
    patches = [
        (torch.cuda, "get_device_capability", lambda *_: capability),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0)),
        (torch.cuda, "device", lambda *_: nullcontext()),
        (torch.cuda.nvtx, "range", lambda *_: nullcontext()),
        (cutlass.utils, "HardwareInfo", Hardware),
        (cutlass.base_dsl.runtime.cuda, "get_device_attribute", lambda *_, **__: MULTIPROCESSORS[arch]),
        (cudnn.tensor_adapter, "get_compute_capability", lambda *_, **__: capability),
        (cute, "compile", Compiler(cute.compile if compiles else None, launches)),
    ]
    for target, name, stand_in in patches:
        mock.patch.object(target, name, stand_in).start()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield launches
    finally:
        mock.patch.stopall()
