"""Machine: the architecture of a GPU, and the libraries that are here for it."""

from __future__ import annotations

from functools import cache

import torch

from weft.run.kernels import choice
from weft.run.kernels.choice import Machine

_FAMILIES = {(8, 7): "sm_86", (10, 1): "sm_100", (10, 3): "sm_100", (12, 1): "sm_120"}
_CUDNN = 91500
"""The last version of cuDNN that is wrong for lengths that 128 does not divide; torch avoids it too."""


def machine_of(device: torch.device) -> Machine:
    """The architecture of a GPU, what is installed for it, and what the user asked of torch."""
    cudnn = (torch.backends.cudnn.version() or 0) > _CUDNN and torch.backends.cuda.cudnn_sdp_enabled()
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    strict = torch.are_deterministic_algorithms_enabled()
    return Machine(
        arch_of(device),
        choice.installed() | ({"cudnn"} if cudnn else set()),
        activated=current() is not None,
        deterministic=strict and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@cache
def arch_of(device: torch.device) -> str:
    """The name of a GPU's architecture in the tables here: sm_90, gfx942."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return _FAMILIES.get((major, minor), f"sm_{major}{minor}")
