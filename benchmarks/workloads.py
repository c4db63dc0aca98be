"""What the benchmarks train: a network, its data, its optimizer.

For speed ("conv", "transformer", "big") the data is random, because speed does not depend on what it says. Batches of
the first two make a step take about 0.4 s on one core, so that the share of exchange is what a small cluster of such
machines sees; "big" has many parameters and few tokens: the hardest case for a slow network. For quality ("text",
"images") the data is real, and some of it is held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import data
from benchmarks.models import Transformer, conv_net, small_conv_net

Samples = tuple[Tensor, Tensor]
BLOCK_BYTES = 1 << 16  # every HELD_OUT_EVERY-th block of the text is for validation
HELD_OUT_EVERY = 16
TEXT_WINDOWS = 256  # for validation
TEXT_CONTEXT = 64
WARM_UP_SHARE = 0.05


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD with momentum, so that its time is small."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def _constant(share: float) -> float:
    return 1.0


def warm_up_and_cosine(share: float) -> float:
    """The learning rate as a part of its peak when this share of all steps is done: up in a line, down to 0 as a cosine.

    >>> [round(warm_up_and_cosine(share), 2) for share in (0.0, 0.05, 0.525, 1.0)]
    [0.02, 1.0, 0.5, 0.0]
    """
    if share < WARM_UP_SHARE:
        return max(share, 0.001) / WARM_UP_SHARE
    return 0.5 * (1 + math.cos(math.pi * (share - WARM_UP_SHARE) / (1 - WARM_UP_SHARE)))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network, its data and its optimizer.

    samples_per_rank: the batch of one rank in one step. sample: draws so many. schedule: share of the steps done -> part of the
    peak learning rate. validation: what is held out, if the data is real.
    """

    build: Callable[[], nn.Module]
    samples_per_rank: int
    sample: Callable[[int, torch.Generator], Samples]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _sgd
    schedule: Callable[[float], float] = _constant
    validation: Callable[[], Samples] | None = None

    def model(self, seed: int) -> nn.Module:
        """The model, with the weights of this seed on every rank."""
        torch.manual_seed(seed)
        return self.build()

    def dataset(self, num_samples: int, seed: int) -> TensorDataset:
        """``num_samples`` samples drawn by lot, the same for the same seed, in the order of training."""
        return TensorDataset(*self.sample(num_samples, torch.Generator().manual_seed(seed)))


def _random_images(count: int, generator: torch.Generator) -> Samples:
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def _random_bytes(count: int, generator: torch.Generator, *, context: int) -> Samples:
    text = torch.randint(256, (count, context + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def _text_part(*, held_out: bool) -> Tensor:
    """The text's bytes (n,) for training, or those held out."""
    whole = torch.from_numpy(data.text())
    place = torch.arange(len(whole)) // BLOCK_BYTES % HELD_OUT_EVERY
    return whole[(place == HELD_OUT_EVERY - 1) == held_out]


def _windows(text: Tensor, starts: Tensor) -> Samples:
    """The TEXT_CONTEXT bytes from each start, and for each byte the next one."""
    windows = text[starts[:, None] + torch.arange(TEXT_CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _text(count: int, generator: torch.Generator) -> Samples:
    text = _text_part(held_out=False)
    return _windows(text, torch.randint(len(text) - TEXT_CONTEXT, (count,), generator=generator))


def _text_validation() -> Samples:
    text = _text_part(held_out=True)
    return _windows(text, torch.arange(TEXT_WINDOWS) * ((len(text) - TEXT_CONTEXT) // TEXT_WINDOWS))


def _fashion(part: str) -> Samples:
    images, labels = data.fashion(part)
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.copy()).long()


def _images(count: int, generator: torch.Generator) -> Samples:
    """Epoch after epoch, each in an order of its own."""
    images, labels = _fashion("train")
    epochs = math.ceil(count / len(labels))
    chosen = torch.cat([torch.randperm(len(labels), generator=generator) for _ in range(epochs)])[:count]
    return images[chosen], labels[chosen]


WORKLOADS = {
    "conv": Workload(build=conv_net, samples_per_rank=12, sample=_random_images),
    "transformer": Workload(
        build=partial(Transformer, width=320, layers=6, heads=5, context=128),
        samples_per_rank=8,
        sample=partial(_random_bytes, context=128),
    ),
    "big": Workload(
        build=partial(Transformer, width=512, layers=8, heads=8, context=64),
        samples_per_rank=1,
        sample=partial(_random_bytes, context=64),
    ),
    "text": Workload(
        build=partial(Transformer, width=128, layers=3, heads=4, context=TEXT_CONTEXT, rotary=True),
        samples_per_rank=8,
        sample=_text,
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
        schedule=warm_up_and_cosine,
        validation=_text_validation,
    ),
    "images": Workload(
        build=small_conv_net,
        samples_per_rank=64,
        sample=_images,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01),
        schedule=warm_up_and_cosine,
        validation=partial(_fashion, "t10k"),
    ),
}
