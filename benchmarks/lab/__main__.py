"""``python -m benchmarks.lab``: several hosts on one machine, for trying things by hand."""

from __future__ import annotations

import argparse
import re
import signal
import sys

from benchmarks.lab.hosts import Lab
from benchmarks.lab.line import measure
from benchmarks.lab.tools import LabError, clean, why_not

UNITS_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
EXAMPLE = """\
example (as root; two more terminals):
  python -m benchmarks.lab up --hosts 2 --rate 100mbit
  ip netns exec gwlab-...-h0 gradwire run -n 1 --nodes 2 --node-rank 0 --rendezvous 10.77.0.1:29400 train.py
  ip netns exec gwlab-...-h1 gradwire run -n 1 --nodes 2 --node-rank 1 --rendezvous 10.77.0.1:29400 train.py
"""


def rate_mbit(text: str) -> float:
    """A rate as `tc` writes it, in Mbit/s.

    >>> rate_mbit("1gbit"), rate_mbit("100mbit"), rate_mbit("1.5Gbit")
    (1000.0, 100.0, 1500.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate like 100mbit or 1gbit")
    return float(match.group(1)) * UNITS_MBIT[match.group(2)]


def up(hosts: int, rate: float) -> None:
    """Build a lab, say how to use it, and keep it until Ctrl-C or SIGTERM."""
    with Lab(hosts=hosts, rate_mbit=rate) as lab:
        for host in range(hosts):
            print(f"host {host}  {lab.address(host)}  ip netns exec {lab.namespace(host)} COMMAND")
        if hosts > 1:
            print(f"measured from host 0 to host 1: {measure(lab) * 8 / 1e6:.0f} Mbit/s")
        print("Ctrl-C removes it", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()


def main() -> int:
    """Parse the command line and obey."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    upward = actions.add_parser("up", help="build a lab and keep it until Ctrl-C")
    upward.add_argument("--hosts", type=int, default=2)
    upward.add_argument("--rate", type=rate_mbit, default=1000.0, metavar="1gbit", help="of every wire, both ways")
    actions.add_parser("clean", help="remove what labs of dead processes left behind")
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    try:
        if args.action == "up":
            up(args.hosts, args.rate)
        else:
            removed = clean()
            print(f"removed {', '.join(removed)}" if removed else "nothing was left behind")
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
