"""Facts: what every rank says about its machine and its software."""

import os
import platform
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchcomp._version import __version__
from torchcomp.advisor.doctor.addresses import interface_of, mtu_of
from torchcomp.advisor.doctor.job import Job
from torchcomp.kernels.backend import fast_form


@dataclass(frozen=True)
class Facts:
    """One rank's machine and software. Versions that do not exist here are ""."""

    host: str
    backend: str  # "gloo" or "nccl"
    node: int
    local_world_size: int  # ranks of the node
    torch: str
    torchcomp: str
    python: str
    nccl: str
    driver: str  # version of the GPU's driver
    gpu: str  # its name
    cores: int  # that this process may use
    threads: int  # that torch uses for an operation
    omp_num_threads: str  # the variable
    shm_bytes: int  # size of /dev/shm, or -1 if there is none
    shm_free: int  # its free bytes, or -1
    kernels: str  # "Numba", "Triton" or "plain torch", which encodes the messages
    address: str  # where other ranks connect to
    interface: str  # its network interface
    mtu: int  # largest packet of the interface, or 0 if it is not known


def own_facts(job: Job, address: str) -> Facts:
    """Return the facts of this rank."""
    size, free = _shared_memory()
    interface = interface_of(address)
    on_gpu = job.backend == "nccl"
    return Facts(
        host=socket.gethostname(),
        backend=job.backend,
        node=job.node,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        torch=torch.__version__,
        torchcomp=__version__,
        python=platform.python_version(),
        nccl=_nccl() if on_gpu else "",
        driver=_driver(),
        gpu=torch.cuda.get_device_name(job.device) if on_gpu else "",
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        shm_bytes=size,
        shm_free=free,
        kernels=_kernels(job.device.type),
        address=address,
        interface=interface,
        mtu=mtu_of(interface),
    )


def _shared_memory() -> tuple[int, int]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return -1, -1
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _nccl() -> str:
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


def _kernels(device: str) -> str:
    if fast_form("sparse", device) is None:
        return "plain torch"
    return "Triton" if device == "cuda" else "Numba"
