"""Real data for benchmarks and examples, fetched from Debian's packages: ``python -m benchmarks.data`` (``make data``).

Nothing is installed: the packages are downloaded and unpacked in a temporary folder, and what is needed is copied.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent.parent / "data"
FASHION = DATA / "fashion-mnist"
TEXT = DATA / "python-docs.txt"
LIBRARY_TEXT = DATA / "python-library.txt"  # stands in where the package cannot be had
PACKAGES = ("dataset-fashion-mnist", "python3.11-doc")
TEXT_BYTES_AT_LEAST = 9_000_000  # 11,046,319 in 3.11.2; a later edition may differ a little
SHA256 = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}


class MissingDataError(Exception):
    """The data is not there or not what it should be; the message says what to do."""


def fashion(part: str = "train") -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Fashion-MNIST: images (n, 28, 28) and labels (n,); part is "train" (60,000) or "t10k" (10,000)."""
    return idx(FASHION / f"{part}-images-idx3-ubyte.gz"), idx(FASHION / f"{part}-labels-idx1-ubyte.gz")


def idx(path: Path) -> NDArray[np.uint8]:
    """A gzip IDX file of bytes, in the shape that its header gives.

    Format: two zero bytes, 8 (unsigned byte), the number of dims, each dim as a big-endian uint32, the values.
    """
    if not path.exists():
        raise MissingDataError(f"{path} is missing; run: make data")
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise MissingDataError(f"{path} is not an IDX file of bytes; delete it and run: make data")
    num_dims = raw[3]
    shape = tuple(int(dim) for dim in np.frombuffer(raw, ">u4", count=num_dims, offset=4))
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * num_dims)
    if values.size != np.prod(shape):
        raise MissingDataError(f"{path} holds {values.size} values, its header says {shape}; delete it, run: make data")
    return values.reshape(shape)


def text_path() -> Path:
    """Which text there is: the documentation of Python 3.11, or else the source of Python's standard library."""
    for path in (TEXT, LIBRARY_TEXT):
        if path.exists():
            return path
    raise MissingDataError(f"{TEXT} is missing; run: make data")


def text() -> NDArray[np.uint8]:
    """Its bytes, about 11 million."""
    return np.fromfile(text_path(), dtype=np.uint8)


def take_library() -> None:
    """Join the standard library's own .py files, in order of their names, tests and installed packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    DATA.mkdir(parents=True, exist_ok=True)
    LIBRARY_TEXT.write_bytes(b"\n".join(path.read_bytes() for path in files))


def fetch() -> None:
    """Download, unpack, check and put everything under ``data/``."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise MissingDataError(
                f"{tool} is not on this machine, and the data comes from Debian's packages {', '.join(PACKAGES)}; "
                "run this on Debian or Ubuntu and copy its data/ folder here"
            )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)  # apt's own user may read it
        _unpack(root)
        _take_fashion(root)
        _take_text(root)


def _unpack(root: Path) -> None:
    for package in PACKAGES:
        found = subprocess.run(["apt-get", "download", package], cwd=root, capture_output=True, text=True, check=False)
        if found.returncode != 0:
            raise MissingDataError(
                f"apt-get could not download {package}: {found.stderr.strip()}\n"
                "if it does not know the package, run this as root and try again: apt-get update"
            )
    for archive in root.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, root / "unpacked"], check=True)


def _take_fashion(root: Path) -> None:
    FASHION.mkdir(parents=True, exist_ok=True)
    for name, digest in SHA256.items():
        source = root / "unpacked/usr/share/datasets/fashion-mnist" / name
        found = hashlib.sha256(source.read_bytes()).hexdigest()
        if found != digest:
            raise MissingDataError(f"{name}: SHA-256 is {found}, not {digest}: the package has changed; nothing copied")
        shutil.copy(source, FASHION / name)


def _take_text(root: Path) -> None:
    found = (root / "unpacked/usr/share/doc").glob("python3*/html/_sources/**/*.rst.txt")
    pages = sorted({page.resolve() for page in found})  # one of two folders is a link to the other
    joined = b"\n".join(page.read_bytes() for page in pages)
    if len(joined) < TEXT_BYTES_AT_LEAST:
        raise MissingDataError(f"only {len(joined)} bytes of text in {len(pages)} pages; {PACKAGES[1]} has changed")
    TEXT.write_bytes(joined)


def main() -> int:
    """Fetch what is missing and say what is there."""
    try:
        if not (TEXT.exists() and all((FASHION / name).exists() for name in SHA256)):
            fetch()
    except MissingDataError as error:
        take_library()
        print(f"{error}\nthe text is the source of Python's standard library instead", file=sys.stderr)
    try:
        for part in ("train", "t10k"):
            images, labels = fashion(part)
            print(f"Fashion-MNIST {part}: images {images.shape}, labels {labels.shape}")
        print(f"text: {text_path().name}, {text().size} bytes")
    except MissingDataError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
