"""Two launchers on one loopback are two hosts."""

import os
import signal
import socket
import time

import pytest
from launching import is_alive, wait_until  # pyright: ignore[reportMissingImports]

from gradwire.errors import LaunchError
from gradwire.launch import network
from gradwire.launch.gathering import Gathering, Node
from gradwire.launch.hosts import derived_token

WHO = (
    "print(rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank, env.plan_text)\nheart.leave(None)"
)


@pytest.fixture
def port():
    return network.free_port("127.0.0.1")


def nodes(launch, body, port, *options, counts=(1, 1), **env):
    """Launch one launcher a node, node 1 first."""
    return [
        launch(
            body, "-n", str(counts[rank]), "--nodes", str(len(counts)), "--node-rank", str(rank), "--output", "all",
            "--rendezvous", f"127.0.0.1:{port}", *options, **env,
        )
        for rank in reversed(range(len(counts)))
    ][::-1]  # fmt: skip


def test_nodes_of_different_sizes_share_the_ranks(launch, port):
    first, second = nodes(launch, WHO, port, "--accumulate", "2", counts=(2, 1))
    assert (first.wait(), second.wait()) == (0, 0), first.err() + second.err()
    assert "[0] 0 3 0 2 0 accumulate = 2" in first.out() and "[1] 1 3 1 2 0 accumulate = 2" in first.out()
    assert "[2] 2 3 0 1 1 accumulate = 2" in second.out()


def test_a_failure_on_node_one_ends_node_zero_and_is_shown_on_both(launch, port):
    first, second = nodes(launch, "if rank == 1: raise ValueError('boom')\nwait_for_peers()", port)
    assert (first.wait(), second.wait()) == (1, 1)
    for job in (first, second):
        assert "gradwire: rank 1 on testhost failed at step 12: ValueError: boom" in job.err()
        assert job.err().count("Traceback") == 1


def test_a_failure_on_node_zero_is_one_line_on_node_one(launch, port):
    first, second = nodes(launch, "if rank == 0: sys.exit(3)\nwait_for_peers()", port)
    assert (first.wait(), second.wait()) == (3, 3)
    assert len([line for line in second.err().splitlines() if "exited with code 3" in line]) == 1


def test_the_loss_of_a_launcher_stops_the_others(launch, port):
    first, second = nodes(launch, "wait_for_peers()", port)
    pids = first.pids(2)
    second.process.kill()
    assert first.wait(10) == 1
    assert "the launcher of node 1 ended without a word" in first.err() or "SIGKILL" in first.err()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the workers", timeout_s=3)


def test_the_loss_of_node_zero_stops_the_others(launch, port):
    first, second = nodes(launch, "wait_for_peers()", port)
    pids = first.pids(2)
    first.process.kill()
    assert second.wait(10) == 1
    assert "node 0 at 127.0.0.1" in second.err() and "is gone" in second.err()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the workers", timeout_s=3)


def test_an_interrupt_on_one_node_ends_all(launch, port):
    first, second = nodes(launch, "wait_for_peers()", port)
    pids = first.pids(2)
    second.process.send_signal(signal.SIGTERM)
    assert (first.wait(10), second.wait(10)) == (143, 143)
    assert "was ended by SIGTERM" in first.err()
    assert not any(is_alive(pid) for pid in pids)


def test_a_node_of_another_job_is_refused_within_a_second(launch, port):
    waiting = launch("x = 1", "--nodes", "2", "--node-rank", "0", "--rendezvous", f"127.0.0.1:{port}", heartbeat=False)
    wait_until(lambda: network.port_owner(port), "the listening")
    start = time.monotonic()
    stranger = launch("x = 2", "--nodes", "2", "--node-rank", "1", "--rendezvous", f"127.0.0.1:{port}", heartbeat=False)
    assert stranger.wait(5) == 1
    assert time.monotonic() - start < 2.0  # one second, and the start of an interpreter
    assert f"127.0.0.1:{port} belongs to another job" in stranger.err()
    assert "a connection from 127.0.0.1 is refused: it belongs to another job" in waiting.err()
    assert waiting.process.poll() is None


def test_a_node_rank_that_is_taken_is_refused(launch, port):
    options = ("--nodes", "3", "--rendezvous", f"127.0.0.1:{port}", "--node-rank")
    launch("", *options, "0", heartbeat=False)
    wait_until(lambda: network.port_owner(port), "the listening")
    one = [launch("", *options, "1", heartbeat=False) for _ in range(2)]
    wait_until(lambda: any(job.process.poll() is not None for job in one), "the refusal")
    (refused,) = [job for job in one if job.process.poll() is not None]
    assert refused.wait() == 1
    assert "node rank 1 is taken by" in refused.err()


def test_a_secret_of_the_users_is_used(launch, port):
    address = f"127.0.0.1:{port}"
    launch("", "--nodes", "2", "--node-rank", "0", "--rendezvous", address, heartbeat=False, GRADWIRE_TOKEN="a")
    wait_until(lambda: network.port_owner(port), "the listening")
    other = launch("", "--nodes", "2", "--node-rank", "1", "--rendezvous", address, heartbeat=False, GRADWIRE_TOKEN="b")
    assert other.wait(5) == 1 and "belongs to another job" in other.err()
    mine = launch("", "--nodes", "2", "--node-rank", "1", "--rendezvous", address, heartbeat=False, GRADWIRE_TOKEN="a")
    assert mine.wait(10) == 0


def test_a_port_in_use_is_named_with_its_owner(launch, port):
    with socket.create_server(("127.0.0.1", port)):
        job = launch("", "--nodes", "2", "--node-rank", "0", "--rendezvous", f"127.0.0.1:{port}", heartbeat=False)
        assert job.wait(5) == 1
    assert f"port {port} of --rendezvous 127.0.0.1:{port} is in use by pid {os.getpid()} (" in job.err()
    assert "use another port" in job.err()


def test_every_address_is_not_listened_on():
    with pytest.raises(LaunchError, match=r"0\.0\.0\.0 of --rendezvous is every address"):
        network.bind_rendezvous("0.0.0.0", 29500)


def test_an_address_of_another_host_is_refused_with_the_cure():
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1 of --rendezvous is not an address of this host.*use one of"):
        network.bind_rendezvous("192.0.2.1", 29500)


def test_waiting_ends_at_the_join_timeout_and_names_who_is_missing(launch, port):
    options = ("--nodes", "3", "--rendezvous", f"127.0.0.1:{port}", "--join-timeout", "1", "--node-rank")
    first = launch("", *options, "0", heartbeat=False)
    assert first.wait(10) == 1
    assert "waiting for node ranks 1 and 2 to join" in first.err() and "--join-timeout" in first.err()
    late = launch("", *options, "1", heartbeat=False)
    assert late.wait(10) == 1
    assert f"waiting for node 0 at 127.0.0.1:{port}" in late.err()


def test_a_signal_while_waiting_for_hosts_ends_the_launcher(launch, port):
    job = launch("", "--nodes", "2", "--node-rank", "0", "--rendezvous", f"127.0.0.1:{port}", heartbeat=False)
    wait_until(lambda: network.port_owner(port), "the listening")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(3) == 143


def test_tokens_agree_on_one_job_and_differ_otherwise():
    one = derived_token(rendezvous=("h", 1), nodes=2, program=b"x", arguments=["a"])
    assert one == derived_token(rendezvous=("h", 1), nodes=2, program=b"x", arguments=["a"])
    others = [
        derived_token(rendezvous=("h", 2), nodes=2, program=b"x", arguments=["a"]),
        derived_token(rendezvous=("h", 1), nodes=3, program=b"x", arguments=["a"]),
        derived_token(rendezvous=("h", 1), nodes=2, program=b"y", arguments=["a"]),
        derived_token(rendezvous=("h", 1), nodes=2, program=b"x", arguments=["b"]),
    ]
    assert len({one, *others}) == 5


def node(node_rank, *, nodes=2, num_local=1, plan=""):
    return Node(node_rank=node_rank, nodes=nodes, num_local=num_local, host=f"h{node_rank}", pid=node_rank, plan=plan)


def test_ranks_are_given_in_node_order():
    gathering = Gathering(3, store=("h", 1), foreign_port=2)
    for node_rank, num_local in ((2, 1), (0, 3), (1, 2)):
        assert gathering.join(node(node_rank, nodes=3, num_local=num_local)) is None
    assert [gathering.assignment(node_rank).offset for node_rank in range(3)] == [0, 3, 5]
    assert {gathering.assignment(node_rank).world_size for node_rank in range(3)} == {6}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (node(0), "node rank 0 is taken by h0"),
        (node(1, nodes=3), "--nodes 2, this one with --nodes 3"),
        (node(2), "outside 0 to 1"),
        (node(1, plan="accumulate = 2"), "another plan"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(second, words):
    gathering = Gathering(2, store=("h", 1), foreign_port=2)
    assert gathering.join(node(0)) is None
    assert words in (gathering.join(second) or "")


def test_interfaces_are_found_by_route():
    assert network.interface_for("127.0.0.1") == "lo"
    for name, address in network.own_addresses().items():
        assert network.interface_for(address) == name
