"""Select the GPU of this rank, and check that no two ranks share one.

    pipe = pipe.to(weft.device())             # on every rank, before weft.parallelize

Nothing here has run on a GPU; the rules are those that torch, NCCL and Slurm document.
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from weakref import WeakKeyDictionary

import torch

from weft.core.errors import InputError
from weft.run.agree import gather_text
from weft.run.comm import Comm

LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID")
"""Variables with a rank's index on its host: torchrun and weft set the first, srun the second."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_checked: WeakKeyDictionary[Comm, torch.device] = WeakKeyDictionary()
"""The device of this rank that was compared with the others, by communicator."""


def device() -> torch.device:
    """Return the device of this rank and make it the current one; the CPU where torch has no GPU.

    The GPU's index is the rank's index on its host (LOCAL_RANK, or Slurm's SLURM_LOCALID). It is 0 if each
    rank sees one GPU only, as with `srun --gpus-per-task=1` or with a CUDA_VISIBLE_DEVICES for each rank.
    Without a launcher, the current GPU is kept.

    >>> x = torch.zeros(3, device=device())
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    own = _own_index()
    if own is not None:
        torch.cuda.set_device(own)
    return torch.device("cuda", torch.cuda.current_device())


def default_dtype() -> str:
    """Return the dtype in which commands load a model: bfloat16 on GPUs, float32 on CPUs."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


def check_devices(comm: Comm, device: torch.device) -> None:
    """Compare the devices of all ranks once for each communicator, and make `device` the current one.

    All ranks raise if some are on GPUs and some on CPUs, if one is not on its own GPU, or if two share a GPU,
    for which NCCL would fail ("Duplicate GPU detected") or hang.
    """
    if comm.size == 1 or _checked.get(comm) == device:
        return
    ranks: list[dict[str, str]] = [json.loads(text) for text in gather_text(comm, json.dumps(_facts(device)))]
    for rank, each in enumerate(ranks):
        if wrong := each.get("wrong") or each.get("error"):  # an error: it has come to agree on an attention
            raise InputError(f"Rank {rank}: {wrong}")
        if each["device"].partition(":")[0] != ranks[0]["device"].partition(":")[0]:
            raise InputError(
                f"Rank 0 is on {ranks[0]['device']}, rank {rank} on {each['device']}.",
                hint="All ranks compute on GPUs, or all on CPUs: .to(weft.device()) on each of them.",
            )
    _refuse_shared(ranks)
    if device.type == "cuda" and torch.cuda.is_available():
        # NCCL's point-to-point messages and Triton's launches take the current device.
        torch.cuda.set_device(device)
    _checked[comm] = device


def _own_index() -> int | None:
    """Return the GPU of this rank among the visible ones; None without a launcher."""
    name = next((name for name in LOCAL_RANK if os.environ.get(name)), None)
    if name is None:
        return None
    place, visible = int(os.environ[name]), torch.cuda.device_count()
    if visible == 1 and (name != "LOCAL_RANK" or any(os.environ.get(each) for each in VISIBLE)):
        return 0  # its own one, or shared, which the comparison of the ranks detects
    ranks = max(place + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if ranks > visible:
        raise InputError(
            f"{socket.gethostname()} has {ranks} ranks and {visible} visible GPU{'s' * (visible > 1)}.",
            hint=f"Start at most {visible} there (--ranks or --nproc-per-node {visible}), or make more GPUs "
            "visible: see CUDA_VISIBLE_DEVICES.",
        )
    return place


def _facts(device: torch.device) -> dict[str, str]:
    """Return the facts about this rank's device that the other ranks check."""
    facts = {"device": str(device), "host": socket.gethostname()}
    if device.type != "cuda" or not torch.cuda.is_available():  # fake tensors are on GPUs that do not exist
        return facts
    current = torch.cuda.current_device()
    try:
        own = _own_index()
    except InputError as error:
        return facts | {"wrong": str(error)}
    if device.index not in (own, current):
        right = current if own is None else own
        hint = "Move models and tensors with .to(weft.device())."
        return facts | {"wrong": f"its tensors are on {device}, but its GPU is cuda:{right}. {hint}"}
    # Ranks that see one GPU each all call it 0; UUIDs are unique.
    properties = torch.cuda.get_device_properties(device.index)  # pyright: ignore
    return facts | {"gpu": str(getattr(properties, "uuid", device.index))}  # pyright: ignore


def _refuse_shared(ranks: list[dict[str, str]]) -> None:
    by_gpu: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, each in enumerate(ranks):
        if "gpu" in each:
            by_gpu[each["host"], each["gpu"]].append(rank)
    for (host, _), shared in by_gpu.items():
        if len(shared) > 1:
            names = f"{', '.join(map(str, shared[:-1]))} and {shared[-1]}"
            gpu = ranks[shared[0]]["device"].removeprefix("cuda:")
            raise InputError(
                f"Ranks {names} are {'both' if len(shared) == 2 else 'all'} on GPU {gpu} of host {host}.",
                hint='Each rank needs a GPU of its own: .to(weft.device()), not .to("cuda"), and as many '
                "visible GPUs on a host as ranks.",
            )
