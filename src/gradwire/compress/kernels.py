"""The inner loops in C, compiled on first use with the system's ``cc``; without one the eager code is used.

Either gives the same bits. The library is kept in the user's cache folder under a name made from the source, the
compiler's flags and the processor, so that hosts of different kinds may share a home.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradwire.launch.environment import read_cache_folder

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-shared", "-fPIC", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILE_TIMEOUT_S = 60.0
_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_ARGUMENTS = {
    "gw_quantize": [_POINTER, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT32],
    "gw_dequantize": [_POINTER, _POINTER, _INT64, _INT64, _INT32],
    "gw_dequantize_sum": [_POINTER, _POINTER, _INT64, _INT64, _INT32],
    "gw_to_bfloat16": [_POINTER, _POINTER, _POINTER, _POINTER, _INT64],
    "gw_finite": [_POINTER, _INT64],
    "gw_scale": [_POINTER, _POINTER, ctypes.c_float, _INT64],
    "gw_subtract": [_POINTER, _POINTER, _POINTER, _INT64],
}
_RESULTS = {"gw_finite": _INT32, "gw_scale": _INT32, "gw_subtract": _INT32}


@dataclass(frozen=True, kw_only=True)
class Built:
    """What came of compiling. library: None if it failed; words: what is used and why."""

    library: ctypes.CDLL | None
    words: str


_lock = threading.Lock()  # ranks may be threads, and lanes are: one of them compiles
_built: list[Built] = []


def built() -> Built:
    """Compile or find the library, once a process."""
    with _lock:
        if not _built:
            _built.append(build(read_cache_folder()))
        return _built[0]


def available() -> str:
    """Which code runs the codecs on this host's CPU, and why.

    >>> available().split(":")[0] in ("compiled", "eager")
    True
    """
    return built().words


def build(folder: Path | None, compiler: str = "cc") -> Built:
    """Compile the library into ``folder``, or take it from there; never raises.

    A folder that is not this user's, or that others may write to, is not trusted: the library is then compiled
    for this process alone.
    """
    path = shutil.which(compiler)
    if path is None:
        return Built(library=None, words=f"eager: there is no C compiler {compiler!r} on the path")
    try:
        with ExitStack() as stack:
            if folder is None or not _private(folder):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")))
            library = _load(_compiled(path, folder))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return Built(library=None, words=f"eager: {path} failed: {detail}")
    return Built(library=library, words=f"compiled: by {path}")


def _private(folder: Path) -> bool:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    writable = os.access(folder, os.W_OK | os.X_OK)
    return writable and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _compiled(compiler: str, folder: Path) -> Path:
    text = "\n".join([SOURCE.read_text(), compiler, *FLAGS, _processor()])
    target = folder / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
            made.replace(target)  # atomic: of ranks that compile at once the last one wins, and all are right
    return target


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), *sorted(kinds)])


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    return library


def _library_for(tensor: Tensor) -> ctypes.CDLL | None:
    return built().library if tensor.device.type == "cpu" else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def quantize(
    values: Tensor, residual: Tensor | None, bits: int, wire_bytes: int
) -> tuple[Tensor, Tensor | None] | None:
    """`quantize.encode_eager` in one pass; None if there is no kernel for it here."""
    if (library := _library_for(values)) is None:
        return None
    values = values.contiguous()
    residual = None if residual is None else residual.contiguous()
    rows, numel = values.shape
    messages = torch.empty(rows, wire_bytes, dtype=torch.uint8)
    left = None if residual is None else torch.empty_like(values)
    addresses = [_address(tensor) for tensor in (values, residual, messages, left)]
    library.gw_quantize(*addresses, rows, numel, bits)
    return messages, left


def dequantize(messages: Tensor, numel: int, bits: int) -> Tensor | None:
    """`quantize.decode_eager` in one pass; None if there is no kernel for it here."""
    if (library := _library_for(messages)) is None:
        return None
    messages = messages.contiguous()
    out = torch.empty(messages.shape[0], numel)
    library.gw_dequantize(messages.data_ptr(), out.data_ptr(), messages.shape[0], numel, bits)
    return out


def dequantize_sum(messages: Tensor, out: Tensor, bits: int) -> bool:
    """`Quantize.decode_sum` in one pass; False if there is no kernel for it here."""
    if (library := _library_for(out)) is None or not out.is_contiguous():
        return False
    messages = messages.contiguous()
    library.gw_dequantize_sum(messages.data_ptr(), out.data_ptr(), messages.shape[0], out.numel(), bits)
    return True


def to_bfloat16(values: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """`cast.encode_eager` to bfloat16 in one pass; None if there is no kernel for it here."""
    if (library := _library_for(values)) is None:
        return None
    values = values.contiguous()
    residual = None if residual is None else residual.contiguous()
    messages = torch.empty(values.shape, dtype=torch.bfloat16)
    left = None if residual is None else torch.empty_like(values)
    addresses = [_address(tensor) for tensor in (values, residual, messages, left)]
    library.gw_to_bfloat16(*addresses, values.numel())
    return messages.view(torch.uint8), left


def finite(values: Tensor) -> bool | None:
    """Whether all of it is finite; None if there is no kernel for it here."""
    if (library := _library_to_look_with(values)) is None:
        return None
    return bool(library.gw_finite(values.data_ptr(), values.numel()))


def scale(values: Tensor, out: Tensor, factor: float) -> bool | None:
    """``out = factor * values`` and whether all of it is finite, in one pass; None if there is no kernel for it here.

    values, out: the same shape.
    """
    if (library := _library_to_look_with(values, out)) is None:
        return None
    return bool(library.gw_scale(values.data_ptr(), out.data_ptr(), factor, values.numel()))


def subtract(left: Tensor, right: Tensor, out: Tensor) -> bool | None:
    """``out = left - right`` and whether all of it is finite, in one pass; None if there is no kernel for it here."""
    if (library := _library_to_look_with(left, right, out)) is None:
        return None
    return bool(library.gw_subtract(left.data_ptr(), right.data_ptr(), out.data_ptr(), out.numel()))


def _library_to_look_with(*tensors: Tensor) -> ctypes.CDLL | None:
    """For kernels that look at each number. They have one thread: where torch has more, torch's own are as fast."""
    whole = all(t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    return built().library if whole and torch.get_num_threads() == 1 else None
