"""Addresses: which address of this machine gloo or NCCL uses."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from torchcomp.errors import SpecError

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def own_address(backend: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address that other ranks connect to.

    gloo takes GLOO_SOCKET_IFNAME, or else the address of the host's name. NCCL takes
    NCCL_SOCKET_IFNAME, or else a network card; the one towards the store of the job is assumed.

    Raises:
        SpecError: if the variable names no interface that has an address.
    """
    variable = _VARIABLES[backend]
    wanted = environment.get(variable, "")
    if wanted:
        addresses = filter(None, map(_address_of, _matching(wanted, backend)))
        address = next(addresses, None)
        if address is None:
            raise SpecError(
                f"{variable}={wanted}: no such interface has an IPv4 address here; there are "
                f"{', '.join(_interfaces())}"
            )
        return address
    if backend == "gloo":
        return _of_host_name()
    return _towards(environment.get("MASTER_ADDR", _LOOPBACK))


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address, or "" if none has."""
    return next((name for name in _interfaces() if _address_of(name) == address), "")


def mtu_of(interface: str) -> int:
    """Return the largest packet of an interface in bytes, or 0 if it is not known."""
    try:
        return int(Path("/sys/class/net", interface, "mtu").read_text())
    except (OSError, ValueError):
        return 0


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _matching(wanted: str, backend: str) -> list[str]:
    """Return the interfaces that a variable selects.

    gloo reads names. NCCL reads prefixes, "=" in front of names, and "^" in front of what to leave
    out.
    """
    words = wanted.lstrip("^=").split(",")
    if backend == "gloo" or wanted.startswith("="):
        return [name for name in words if name in _interfaces()]
    left_out = wanted.startswith("^")
    return [name for name in _interfaces() if name.startswith(tuple(words)) != left_out]


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, or "" if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _of_host_name() -> str:
    """Return the address that the host's name stands for, if this machine has it."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    for *_, (address, *_) in found:
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return str(address)
    return _LOOPBACK


def _towards(host: str) -> str:
    """Return the address from which this machine reaches a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing
        except OSError:
            return _LOOPBACK
        return str(probe.getsockname()[0])
