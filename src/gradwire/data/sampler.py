"""`ShardedSampler`: this rank's parts as a batch sampler, for those who keep torch's own DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from torch.utils.data import Sampler

from gradwire.data.check import recipe_for, whole
from gradwire.data.peers import World, here
from gradwire.data.sources import RecipeState
from gradwire.data.split import Split, Uniform
from gradwire.data.state import pack, unpack
from gradwire.data.turns import Position, Seat, following

UNIFORM = Uniform()


class ShardedSampler(Sampler[list[int]]):
    """Index lists of this rank's part of every global batch.

    ``torch.utils.data.DataLoader(dataset, batch_sampler=gw.ShardedSampler(len(dataset), 64))``

    dataset: the data set or its length. batch_size: the GLOBAL batch. The other arguments, the order and the epochs
    are those of ``DataLoader``. It cannot tell the synchroniser what a batch counts, so:

    - with parts of unequal size call ``gw.weight(len(x))`` each step (parts differ by one sample if batch_size or
      the data set's length is not divisible by the number of ranks, and under every split but ``Uniform``);
    - an empty part is skipped, so that ranks may make different numbers of turns (a last batch smaller than the
      world, ``ByClass``): use ``drop_last=True`` or ``DataLoader``, which keeps all ranks in lockstep;
    - its state counts what torch has asked for; with ``num_workers`` that runs ahead of the loop. ``DataLoader``
      counts exactly.

    Raises DataError for a wrong argument.

    >>> from types import SimpleNamespace
    >>> list(ShardedSampler(10, 4, shuffle=False, world=SimpleNamespace(rank=1, reader_rank=1, num_readers=2)))
    [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        split: Split = UNIFORM,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        world: World | None = None,
    ) -> None:
        world = here(world)
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        recipe = recipe_for(
            length=whole("dataset", length, least=1, cure="give the data set or its length"), stream=False,
            batch_size=batch_size, split=split, shuffle=shuffle, seed=seed, drop_last=drop_last, world=world,
        )  # fmt: skip
        self._recipe, self._source = recipe, RecipeState(recipe)
        self._seat = Seat(rank=world.reader_rank, size=world.num_readers)
        self._position = Position(epoch=0)
        self._untouched = True

    @property
    def epoch(self) -> int:
        """The epoch that is being read or, between two, comes next; from 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` reads ``epoch``. Not needed: epochs advance by themselves."""
        self._position = Position(epoch=whole("epoch", epoch, least=0, cure="epochs count from 0"))
        self._untouched = True

    def __len__(self) -> int:
        return self._recipe.num_turns(self.epoch, self._seat)

    def __iter__(self) -> Iterator[list[int]]:
        return self._parts()

    def _parts(self) -> Iterator[list[int]]:
        if not self._untouched:
            self._position = Position(epoch=self._position.epoch + 1)
        epoch = self._position.epoch
        for turn in self._recipe.turns(self._position, self._seat):
            self._position, self._untouched = following(turn.micro), False
            yield turn.indices
        self._position, self._untouched = Position(epoch=epoch + 1), True

    def state_dict(self) -> dict[str, object]:
        """Where it stands: JSON-able values."""
        return pack(self._source, self._position, self._seat)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state`` was taken. Raises DataError if it is of another recipe."""
        self._position, self._untouched = unpack(state, self._source, self._seat), True
