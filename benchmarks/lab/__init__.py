"""Several hosts on one machine: network namespaces joined by a switch, every wire at a chosen rate.

>>> from benchmarks.lab import Lab
>>> Lab(hosts=2, rate_mbit=100).address(1)
'10.77.0.2'
"""

from benchmarks.lab.hosts import Finished, Lab
from benchmarks.lab.tools import LabError, clean, why_not

__all__ = ["Finished", "Lab", "LabError", "clean", "why_not"]
