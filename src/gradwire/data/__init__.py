"""What each rank reads: loaders, splits, and the order of an epoch."""

from gradwire.data.chance import Random, Sample
from gradwire.data.classes import ByClass, Stratified
from gradwire.data.loader import DataLoader
from gradwire.data.sampler import ShardedSampler
from gradwire.data.shard import shard
from gradwire.data.split import Local, Proportional, Split, Uniform

__all__ = [
    "ByClass",
    "DataLoader",
    "Local",
    "Proportional",
    "Random",
    "Sample",
    "ShardedSampler",
    "Split",
    "Stratified",
    "Uniform",
    "shard",
]
