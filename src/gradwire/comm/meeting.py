"""How the ranks of a job meet: the store, the heartbeat, torch's default process group."""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from gradwire.comm.traced import Unstamped, Watch, blame
from gradwire.comm.wake import open_sockets, shut_sockets
from gradwire.errors import LaunchError
from gradwire.launch.coordinator import Coordinator
from gradwire.launch.environment import Environment, prefer_interface
from gradwire.launch.excepthook import install_excepthook
from gradwire.launch.heartbeat import Heartbeat
from gradwire.launch.network import interface_for, resolve

JOIN_TIMEOUT_S = 120.0
Store = dist.Store
_WORLDS = itertools.count()


@dataclass(kw_only=True)
class Meeting:
    """What a world stands on. heartbeat: None for a world of one and for ranks that are threads."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    store: dist.Store
    timeout_s: float
    heartbeat: Heartbeat | None = None
    coordinator: Coordinator | None = None
    opened_default_group: bool = False

    @property
    def watch(self) -> Watch:
        """Who hears of every collective."""
        return self.heartbeat or Unstamped()

    def at_step(self, step: int, step_s: float) -> None:
        """Tell where the loop is."""
        if self.heartbeat is not None:
            self.heartbeat.step, self.heartbeat.step_s = step, step_s

    def note(self, text: str) -> None:
        """Show a line of this rank's where the job's reports are shown, whatever becomes of its own output."""
        if self.heartbeat is not None:
            self.heartbeat.note(text)
        else:
            print(f"gradwire: {text}", file=sys.stderr, flush=True)

    def leave(self, reason: str | None, exit_code: int) -> None:
        """This rank is done; wait for the others."""
        if self.heartbeat is not None:
            self.heartbeat.leave(reason, exit_code=exit_code)

    def fail(self, text: str, *, victim: bool) -> None:
        """This rank ends by an exception."""
        if self.heartbeat is not None:
            self.heartbeat.fail(text, victim=victim)

    def close(self) -> None:
        """Let go of what the meeting opened."""
        if self.opened_default_group and dist.is_initialized():
            dist.destroy_process_group()
        if self.heartbeat is not None:
            self.heartbeat.close()
        if self.coordinator is not None:
            self.coordinator.stop()


def meet(environment: Environment, device: torch.device) -> Meeting:
    """Find the peers that the launcher's variables speak of. Raises LaunchError naming what is missing."""
    if environment.world_size == 1 and environment.control is None:
        return Meeting(store=dist.HashStore(), timeout_s=environment.timeout_s)
    before = open_sockets()
    coordinator, heartbeat = None, None
    if environment.control is not None:
        heartbeat = _connect(environment, environment.control, environment.token or "")
    try:
        store = dist.PrefixStore(f"gradwire/{environment.attempt}/{next(_WORLDS)}", _serve_or_join(environment))
        _claim_rank(store, environment)
        if environment.control is None:  # our own launcher has chosen already
            prefer_interface(interface_for(resolve(environment.store_host)))
        if heartbeat is None:
            coordinator, heartbeat = _embedded(environment, store)
        heartbeat.on_stop(lambda: shut_sockets(keep=before))
        opened = _open_default_group(environment, store, device)
    except RuntimeError as error:  # a peer died before all had met
        raise blame(error, heartbeat or Unstamped(), f"rank {environment.rank} was meeting the others") from error
    return Meeting(
        rank=environment.rank,
        size=environment.world_size,
        local_rank=environment.local_rank,
        local_size=environment.local_world_size,
        node_rank=environment.node_rank,
        store=store,
        timeout_s=environment.timeout_s,
        heartbeat=heartbeat,
        coordinator=coordinator,
        opened_default_group=opened,
    )


def _open_default_group(environment: Environment, store: dist.Store, device: torch.device) -> bool:
    """False if the script did already."""
    if dist.is_initialized():
        return False
    rank, size = environment.rank, environment.world_size
    open_default_group(store, rank, size, timeout_s=environment.timeout_s, cuda=device.type == "cuda")
    return True


def _serve_or_join(environment: Environment) -> dist.Store:
    serve = environment.rank == 0 and not environment.store_served
    return _store(environment.store_host, environment.store_port, environment.store_fd, environment.world_size, serve)


@lru_cache(maxsize=4)  # a second world in one process meets in the same store
def _store(host: str, port: int, listen_fd: int | None, world_size: int, serve: bool) -> dist.Store:
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    if not serve:
        try:
            return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
        except (RuntimeError, OSError) as error:
            raise LaunchError(
                f"rank 0's store at {host}:{port} did not answer within {JOIN_TIMEOUT_S:.0f} s; check that rank 0 runs and "
                f"that MASTER_ADDR and MASTER_PORT are its own ({str(error).splitlines()[0]})"
            ) from None
    fd = _listen(host, port) if listen_fd is None else listen_fd
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=fd,
        use_libuv=True,
    )


def _listen(host: str, port: int) -> int:
    """A listening socket on that address only; torch's own store would listen on every interface."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:  # Slurm's node names need not be host names
        raise LaunchError(
            f"rank 0's host {host} has no address that can be found here ({error.strerror}); set MASTER_ADDR to an "
            "address of rank 0's host on all ranks (export it before srun)"
        ) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} on {host} is in use, perhaps by another job; choose another MASTER_PORT on all ranks"
            ) from None
        raise LaunchError(
            f"rank 0 cannot listen on MASTER_ADDR {host}:{port} ({error.strerror}); "
            "MASTER_ADDR must be an address of rank 0's host"
        ) from None
    return listener.detach()


def _claim_rank(store: dist.Store, environment: Environment) -> None:
    """Two jobs on one store would merge silently; the second claimant of a rank is refused."""
    me = f"process {os.getpid()} on {socket.gethostname()}, {' '.join(sys.argv[:1])}"
    owner = store.compare_set(f"rank/{environment.rank}", "", me).decode()
    if owner != me:
        raise LaunchError(
            f"rank {environment.rank} at {environment.store_host}:{environment.store_port} is taken by {owner}: two jobs share "
            "one MASTER_PORT, or a rank was started twice; give each job its own port"
        )


def _embedded(environment: Environment, store: dist.Store) -> tuple[Coordinator | None, Heartbeat]:
    """Under a foreign launcher rank 0 runs the coordinator and tells the others where."""
    if environment.rank == 0:
        coordinator, address, token = _embed(environment)
        store.set("control", json.dumps([*address, token]))
        return coordinator, _connect(environment, address, token)
    host, port, token = json.loads(store.get("control"))
    return None, _connect(environment, (str(host), int(port)), str(token))


def _connect(environment: Environment, address: tuple[str, int], token: str) -> Heartbeat:
    heartbeat = Heartbeat(
        address=address,
        token=token,
        rank=environment.rank,
        world_size=environment.world_size,
        host=socket.gethostname(),
        reports=environment.control is None,
    )
    install_excepthook(heartbeat)
    return heartbeat


def _embed(environment: Environment) -> tuple[Coordinator, tuple[str, int], str]:
    token = secrets.token_hex(16)
    coordinator = Coordinator(
        token=token,
        world_size=environment.world_size,
        bind=(environment.store_host, 0),
        report=lambda text: print(text, file=sys.stderr, flush=True),
        hang_s=environment.hang_s,
        timeout_s=environment.timeout_s,
    )
    coordinator.start()
    return coordinator, coordinator.address, token


def open_default_group(store: dist.Store, rank: int, size: int, *, timeout_s: float, cuda: bool = False) -> None:
    """torch's default group, which code that calls torch.distributed itself, and torch's meshes, stand on."""
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore("default", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def memory_store() -> Store:
    """A store for ranks that are threads of this process."""
    return dist.HashStore()


def file_store(path: str, size: int) -> Store:
    """A store in a file, for ``size`` processes of one host."""
    return dist.FileStore(path, size)
