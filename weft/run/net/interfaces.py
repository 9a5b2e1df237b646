"""Network interfaces: choose the one that carries the traffic between ranks.

gloo and NCCL listen on the interface that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name, and else on what
the host name resolves to: on an ordinary server that is the network card, even for ranks of one machine.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from array import array
from contextlib import suppress
from pathlib import Path

from weft.core.errors import InputError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SIOCGIFCONF = 0x8912
INTERFACE_BYTES = 40 if struct.calcsize("P") == 8 else 32
MAX_INTERFACES = 1024


def environment(interface: str = LOOPBACK) -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on one interface, unless the user has set others."""
    # NCCL takes prefixes of names; = makes it the name itself.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def resolve(host: str) -> str:
    """Return the address of a host name."""
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[return-value]
    except OSError as error:
        raise InputError(
            f"--master {host} does not resolve: {error.strerror or error}.",
            hint="Pass the address of machine 0, or a name that resolves to it on every machine.",
        ) from error


def choose(master: str, interface: str, *, is_master: bool) -> tuple[str, str]:
    """Return the interface between machines, and this machine's address on it.

    That is `interface`, or the one that has the address of `master`, or on other machines leads to it.
    """
    known = addresses()
    if interface:
        if interface not in known:
            raise InputError(
                f"--interface {interface} has no address on this machine.",
                hint=f"Interfaces with an address: {', '.join(known)}.",
            )
        own = known[interface][0]
        with suppress(InputError):  # with --interface, --master need not resolve here
            own = next((each for each in known[interface] if is_master and each == resolve(master)), own)
        return interface, own
    target = resolve(master)
    if is_master and _is_loopback(target) and master not in (target, "localhost"):
        raise InputError(  # as Debian does with a machine's own name
            f"--master {master} resolves to {target} on machine 0, where no other machine can reach it.",
            hint=f"Pass the address of machine 0, or --interface, one of {', '.join(known)}.",
        )
    own = target if is_master else _route(target)
    for name, own_addresses in known.items():
        if own in own_addresses or (name == LOOPBACK and _is_loopback(own)):
            return name, own
    verb = "has the address" if is_master else "leads to"
    raise InputError(
        f"No interface of this machine {verb} {target} (--master {master}).",
        hint=f"Pass --interface, one of {', '.join(known)}, or an address of machine 0 as --master.",
    )


def addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface that has one, IPv4 first."""
    by_interface: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError, ImportError):
        from fcntl import ioctl

        rows = array("B", bytes(MAX_INTERFACES * INTERFACE_BYTES))
        pointer, length = rows.buffer_info()
        reply = ioctl(any_socket.fileno(), SIOCGIFCONF, struct.pack("iP", length, pointer))
        for at in range(0, struct.unpack("iP", reply)[0], INTERFACE_BYTES):
            name = bytes(rows[at : at + 16]).split(b"\0")[0].decode().partition(":")[0]
            by_interface.setdefault(name, []).append(socket.inet_ntoa(bytes(rows[at + 20 : at + 24])))
    with suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if not address.is_link_local:
                by_interface.setdefault(name, []).append(str(address))
    return by_interface


def _route(target: str) -> str:
    """Return the address of this machine from which packets to `target` would leave, without sending any."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback
