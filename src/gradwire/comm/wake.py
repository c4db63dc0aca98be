"""Wake a thread that is blocked in a dead collective.

Gloo cannot be aborted: ``abort``, ``shutdown`` and ``destroy_process_group`` leave a blocked collective blocked. Shutting its
sockets down from another thread wakes it at once, and it raises.
"""

from __future__ import annotations

import os
import socket
import stat


def open_sockets() -> frozenset[int]:
    """Inode numbers of this process's sockets; empty where there is no /proc."""
    return frozenset(_sockets())


def shut_sockets(*, keep: frozenset[int]) -> None:
    """Shut down every connected TCP socket of this process but those in ``keep``; only for a process that must stop."""
    for inode, fd in _sockets().items():
        if inode in keep:
            continue
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # raises for a listener, whose end Gloo answers by aborting the process
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected, or gone already: nothing waits there


def sentinel() -> socket.socket:
    """A TCP connection to itself: it becomes readable when `shut_sockets` wants this process's waits to end.

    For waits that are not on a socket. Raises OSError where the loopback interface is down.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind(("127.0.0.1", 0))
        made.connect(made.getsockname())
    except OSError:
        made.close()
        raise
    return made


def _sockets() -> dict[int, int]:
    """Inode -> descriptor of every socket."""
    found: dict[int, int] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # closed since the listing
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found
