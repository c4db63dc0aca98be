"""The compiled loops give the bits of the eager code, and whatever stops them leaves that code in use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.compress import cast, kernels, quantize
from gradwire.core.compressor import add_rows
from tests.compress.buckets import normal

needs_compiler = pytest.mark.skipif(kernels.built().library is None, reason=kernels.available())


def bits_of(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else tensor.contiguous().view(torch.uint8).flatten().tolist()


def awkward(rows: int, numel: int, scale: float) -> Tensor:
    """Numbers of one magnitude, with zeros of both signs, ties, denormals and the largest numbers among them."""
    values = (normal(rows * numel, numel) * scale).clamp(-3.4e38, 3.4e38)
    special = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.5, 1e-45, -1e-45, 1e-38, 3.4028234e38, -3.4028234e38])
    places = torch.arange(0, rows * numel, 37)
    values[places] = special[torch.arange(len(places)) % (len(special) if scale > 1e30 else 7)]
    return values.view(rows, numel)


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-20, 1e-36, 1e-38, 1e-44, 1e30, 1e38])
@pytest.mark.parametrize(
    ("rows", "numel"), [(1, 0), (1, 1), (3, 2), (1, 255), (2, 256), (3, 257), (2, 1000), (1, 4103)]
)
@pytest.mark.parametrize("feedback", [False, True])
def test_the_kernels_give_the_bits_of_the_eager_code(rows: int, numel: int, scale: float, feedback: bool) -> None:
    values = awkward(rows, numel, scale)
    residual = 0.25 * normal(rows * numel, 1).view(rows, numel) * min(scale, 1e37) if feedback else None
    for bits in (4, 8):
        wire_bytes = gw.Quantize(bits=bits).wire_bytes(numel)
        made, eager = (
            kernels.quantize(values, residual, bits, wire_bytes),
            quantize.encode_eager(values, residual, bits),
        )
        assert made is not None
        assert [bits_of(tensor) for tensor in made] == [bits_of(tensor) for tensor in eager]
        decoded = kernels.dequantize(made[0], numel, bits)
        assert bits_of(decoded) == bits_of(quantize.decode_eager(made[0], numel, bits))
        total, expected = torch.empty(numel), torch.empty(numel)
        assert kernels.dequantize_sum(made[0], total, bits)
        add_rows(gw.Quantize(bits=bits), made[0], expected, key=0)
        assert bits_of(total) == bits_of(expected)
    made = kernels.to_bfloat16(values, residual)
    assert made is not None
    expected = cast.encode_eager(values, residual, torch.bfloat16)
    assert [bits_of(tensor) for tensor in made] == [bits_of(tensor) for tensor in expected]


@needs_compiler
def test_the_kernels_end_on_numbers_that_are_not_finite() -> None:
    values = awkward(2, 1000, 1.0)
    values[0, 3], values[0, 300], values[1, 5] = float("nan"), float("inf"), -float("inf")
    for bits in (4, 8):
        message, _ = gw.Quantize(bits=bits).encode(values, torch.zeros_like(values), key=0)
        decoded = gw.Quantize(bits=bits).decode(message, 1000, key=0)
        assert decoded[0, :256].isnan().all(), "a block with a NaN must not look healthy"
        assert decoded[0, 512:].isfinite().all()
    codec = gw.Cast(torch.bfloat16)
    decoded = codec.decode(codec.encode(values, None, key=0)[0], 1000, key=0)
    assert decoded.isnan().equal(values.isnan()), "torch writes NaN in two ways"
    assert torch.equal(
        decoded[0, 4:], cast.encode_eager(values[:1, 4:], None, torch.bfloat16)[0].view(torch.bfloat16)[0]
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("numel", [0, 1, 7, 255, 4103])
def test_the_kernels_that_look_at_each_number(numel: int) -> None:
    left, right, out = normal(numel, 1), normal(numel, 2), torch.empty(numel)
    assert kernels.finite(left) is True
    assert kernels.scale(left, out, 0.3) is True
    assert bits_of(out) == bits_of(left * torch.tensor(0.3))
    assert kernels.subtract(left, right, out) is True
    assert bits_of(out) == bits_of(left - right)
    for index in {0, numel // 2, numel - 1} if numel else ():
        for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
            spoilt = left.clone()
            spoilt[index] = bad
            assert kernels.finite(spoilt) is False
            assert kernels.scale(spoilt, out, 0.3) is False
            assert kernels.subtract(right, spoilt, out) is False
    big = torch.full((numel,), 3e38)
    assert kernels.finite(big) is True, "large is not infinite, whatever the sum is"
    assert kernels.subtract(big, -big, out) is (numel == 0)


@pytest.mark.usefixtures("one_thread")
def test_the_kernels_that_look_leave_to_torch_what_they_cannot_read() -> None:
    fine = torch.ones(6)
    for other in (fine.double(), fine.half(), fine.view(2, 3).t(), fine.to("meta")):
        assert kernels.finite(other) is None
        assert kernels.scale(fine.view(other.shape), other, 1.0) is None
        assert kernels.subtract(other, other, other) is None
    torch.set_num_threads(2)
    assert kernels.finite(fine) is None


def test_rows_that_are_not_contiguous_are_read_right() -> None:
    values = normal(2000, 1).view(1000, 2).t()
    expected = quantize.encode_eager(values.contiguous(), None, 4)[0]
    assert bits_of(gw.Quantize(bits=4).encode(values, None, key=0)[0]) == bits_of(expected)


def test_without_a_compiler_the_eager_code_is_used_and_says_so(tmp_path: Path) -> None:
    built = kernels.build(tmp_path, compiler="no-such-compiler")
    assert built.library is None
    assert built.words == "eager: there is no C compiler 'no-such-compiler' on the path"


def test_a_compiler_that_fails_is_named_with_its_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    broken.chmod(0o755)
    built = kernels.build(tmp_path / "cache", compiler=str(broken))
    assert built.library is None
    assert built.words == f"eager: {broken} failed: out of luck"


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    fake = tmp_path / "fake-cc"
    fake.write_text('#!/bin/sh\nfor word; do [ "$last" = -o ] && echo text > "$word"; last=$word; done\n')
    fake.chmod(0o755)
    assert kernels.build(tmp_path / "cache", compiler=str(fake)).library is None


@needs_compiler
def test_the_folder_is_private_and_the_second_process_finds_the_library(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "gradwire"
    assert kernels.build(folder).library is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    (library,) = folder.iterdir()
    made_at = library.stat().st_mtime_ns
    assert kernels.build(folder).library is not None
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [made_at]


@needs_compiler
@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "none"])
def test_a_folder_that_cannot_be_trusted_is_not_used(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "gradwire"
    if kind == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        folder.write_text("")
    built = kernels.build(None if kind == "none" else folder)
    assert built.library is not None, "it is compiled for this process alone"
    assert list(tmp_path.rglob("*.so")) == []


@needs_compiler
def test_ranks_that_compile_at_once_all_get_the_library(tmp_path: Path) -> None:
    results: list[kernels.Built] = []
    threads = [threading.Thread(target=lambda: results.append(kernels.build(tmp_path / "c"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [built.library is not None for built in results] == [True] * 4
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_the_cache_folder_follows_the_environment() -> None:
    from gradwire.launch.environment import read_cache_folder

    assert read_cache_folder({"XDG_CACHE_HOME": "/var/caches"}) == Path("/var/caches/gradwire")
    assert read_cache_folder({"XDG_CACHE_HOME": "relative"}) == Path(os.path.expanduser("~"), ".cache/gradwire")
