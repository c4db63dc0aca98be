"""This host's addresses, interfaces and ports: which to use, and who holds one that is taken."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

from gradwire.errors import LaunchError
from gradwire.launch.coordinator import listen

__all__ = ["bind_rendezvous", "free_port", "interface_for", "own_addresses", "port_owner", "resolve"]

_SIOCGIFADDR = 0x8915
_LISTENING = "0A"


def resolve(host: str) -> str:
    """The numeric address of `host`, IPv4 first. Raises LaunchError if there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"the host {host!r} of --rendezvous has no address ({error}): give its IP address") from error
    addresses = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    return addresses[0]


def own_addresses() -> dict[str, str]:
    """IPv4 address of each network interface that has one."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def interface_for(address: str) -> str:
    """The interface that routes to a numeric IPv4 address; "" if it cannot be told."""
    if address.startswith("127."):
        return "lo"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only asks the routing table
            source = str(probe.getsockname()[0])
    except OSError:
        return ""
    return next((name for name, own in own_addresses().items() if own == source), "")


def free_port(address: str) -> int:
    """A port of `address` that is free now."""
    with listen((address, 0)) as probe:
        return int(probe.getsockname()[1])


def bind_rendezvous(host: str, port: int) -> socket.socket:
    """Listen on HOST:PORT and on no other address. Raises LaunchError with the cure."""
    address = resolve(host)
    if address in ("0.0.0.0", "::"):
        raise LaunchError(
            f"{host} of --rendezvous is every address of a host: give one that the others reach, {_own_list()}"
        )
    if address.startswith("127.") and not host.startswith("127.") and host != "localhost":
        raise LaunchError(f"{host} is {address} on this host, which other hosts cannot reach: use one of {_own_list()}")
    try:
        return listen((address, port))
    except OSError as error:
        raise LaunchError(_bind_problem(host, port, error)) from error


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        by = f" by {owner}" if owner else ""
        return f"port {port} of --rendezvous {host}:{port} is in use{by}: use another port, or end what uses it"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} of --rendezvous is not an address of this host, and node 0 must listen there: use one of "
            f"{_own_list()} on every node, or start this one with another --node-rank"
        )
    return f"node 0 cannot listen on --rendezvous {host}:{port} ({error.strerror}): use another address or port"


def _own_list() -> str:
    addresses = own_addresses()
    return ", ".join(value for name, value in addresses.items() if name != "lo" or len(addresses) == 1)


def port_owner(port: int) -> str:
    """`pid 4242 (python3)` that listens on `port`; "" where /proc does not show it."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").iterdir() if inodes else ():
        if process.name.isdecimal() and _holds(process, inodes):
            return f"pid {process.name} ({_name(process)})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue  # no IPv6, or no /proc: the owner stays unnamed
        inodes |= {row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port}
    return inodes


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(entry) in inodes for entry in (process / "fd").iterdir())
    except OSError:
        return False  # another user's process, or one that has just ended


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "ended just now"
