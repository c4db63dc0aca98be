"""Waiting for a word of shared memory to change: Linux's futex, which Python's standard library does not offer."""

from __future__ import annotations

import ctypes
import platform
import sys

_SYS_FUTEX = 202  # x86-64
_WAIT, _WAKE = 0, 1  # not the PRIVATE kinds: the waiters may be other processes
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LIBC = ctypes.CDLL(None)
_TIMESPEC = ctypes.POINTER(_Timespec)
_FUTEX = ctypes.CFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_uint32, _TIMESPEC
)(("syscall", _LIBC))  # fmt: skip
_YIELD = ctypes.CFUNCTYPE(ctypes.c_int)(("sched_yield", _LIBC))


def supported() -> bool:
    """Whether words may be shared this way: Linux on x86-64.

    Data written before a word must be seen before it. x86-64 keeps the order of stores; other machines need fences, which
    Python cannot place.
    """
    return sys.platform == "linux" and platform.machine() == "x86_64"


def wait_for_change(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``value``, at most ``timeout_s`` < 1 s; may also return for nothing."""
    limit = _Timespec(0, int(timeout_s * 1e9))
    _FUTEX(_SYS_FUTEX, address, _WAIT, value, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake everybody who waits for the word at ``address``; about a microsecond, also if nobody does."""
    _FUTEX(_SYS_FUTEX, address, _WAKE, _EVERYBODY, None)


def yield_core() -> None:
    """Let another thread have the core, and the interpreter: what a loop that spins must do each time round."""
    _YIELD()
