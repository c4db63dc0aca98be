"""Print the largest difference between two files of weights: python examples/compare.py two.pt one.pt"""

import sys

import torch

LIMIT = 1e-4  # float32 sums in another order differ by about 1e-7 a step; training carries that on

if len(sys.argv) != 3:
    sys.exit(__doc__)
first, second = (torch.load(path, weights_only=True) for path in sys.argv[1:])
if first.keys() != second.keys():
    sys.exit(f"not the same model: {sorted(first.keys() ^ second.keys())} are in one file only")
largest = max((first[name] - second[name]).abs().max().item() for name in first)
print(f"largest difference between the weights of {sys.argv[1]} and {sys.argv[2]}: {largest:.1e}")
if not largest <= LIMIT:  # written so that NaN fails too
    sys.exit(f"that is more than rounding ({LIMIT:.0e})")
