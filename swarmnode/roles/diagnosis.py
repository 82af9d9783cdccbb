"""What `swarmnode doctor` looks at on one machine; every finding that is not good carries its fix."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from swarmnode.errors import Conflict, LinkBroken, NodeRemoved, SwarmError
from swarmnode.ids import BootId
from swarmnode.roles.dialing_back import reach
from swarmnode.roles.identity import FOLDER, KEY, NodeIdentity
from swarmnode.roles.roads import Roads
from swarmnode.roles.running_node import RunningNode, is_running, read_running_node
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import API_LISTEN, SWARM_LISTEN, Address, parse_address, reachable_here
from swarmnode.wire.deadlines import CONNECT_S, DIAL_BACK_S, TLS_S
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import PROTOCOL, Identity
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.routes import DIRECT, RELAYED
from swarmnode.wire.tls import SwarmTls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from swarmnode.config import Settings
    from swarmnode.roles.identity import Membership
    from swarmnode.wire.link import Channel, Hello

Status = Literal["pass", "warn", "fail"]
GIB = 1 << 30
PYTHON = (3, 11)
CERTIFICATE_DAYS = 5
"""A certificate renews itself ten days before its end; so close to it something keeps that from happening."""
CLOCK_WARN_S, CLOCK_FAIL_S = 30.0, 600.0
"""Certificates are backdated by an hour, so minutes do no harm yet; they say that nothing sets this clock."""
MEMORY_WARN, MEMORY_FAIL = GIB, GIB >> 2
DISK_WARN, DISK_FAIL = 10 * GIB, GIB
"""The smallest useful models take a few GiB."""
COORDINATOR_S = CONNECT_S + TLS_S + DIAL_BACK_S
"""To a coordinator, and what it then takes to dial back."""
UNREACHED_FIX = "start the coordinator; if it runs, see that its --advertise address is right and its port not blocked"
SWARM_FIX = "choose another with --swarm-listen HOST:PORT, or end the program that has it"
API_FIX = "choose another with --api-listen HOST:PORT, or end the program that has it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `fix` is empty where all is well."""

    check: str
    status: Status
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """The node of a data directory, running or not. `available_bytes` is the memory that is free now."""

    settings: Settings
    available_bytes: int
    node: RunningNode | None
    running: bool
    clock: Callable[[], float] = time.time

    @classmethod
    def look(cls, settings: Settings, available_bytes: int, clock: Callable[[], float] = time.time) -> Patient:
        data_dir = settings.data_dir
        return cls(settings, available_bytes, read_running_node(data_dir), is_running(data_dir), clock)


async def examine(patient: Patient) -> list[Finding]:
    """All findings, the local ones first. Bounded: no check waits for the network longer than COORDINATOR_S."""
    found = [*versions(), memory(patient.available_bytes), *disk(patient.settings), *ports(patient)]
    try:
        identity, member = _membership(patient.settings.data_dir)
    except (SwarmError, OSError) as error:
        fix = "run this as the user whose node it is; restore damaged files, or join again with a token"
        return [*found, Finding("certificate", "fail", str(error), fix)]
    found += certificate(identity, member, patient.clock())
    if identity is not None and member is not None and not any(f.status == "fail" for f in found[-1:]):
        found += await reachability(patient, identity, member)
    return found


# -- this machine


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    if tuple(map(int, platform.python_version_tuple()[:2])) < PYTHON:
        yield Finding("Python", "fail", python, "install Python 3.11 or newer and swarmnode in it")
    else:
        yield Finding("Python", "pass", python)
    yield torch(_installed("torch"), _wanted("torch"))
    yield Finding("protocol", "pass", f"speaks {PROTOCOL[0]} to {PROTOCOL[1]}")


def torch(installed: str | None, wanted: str) -> Finding:
    """Whether the torch that is there is one this swarmnode was made for; `wanted` as in ">=2.11,<2.14"."""
    fix = "run pip install '.[peer]' in swarmnode's folder"
    if installed is None:
        return Finding("torch", "warn", "is not installed, so this machine can coordinate but hold no stages", fix)
    if not within(installed, wanted):
        return Finding("torch", "fail", f"{installed} is not {wanted}", fix)
    return Finding("torch", "pass", f"{installed} ({wanted})" if wanted else installed)


def within(version: str, wanted: str) -> bool:
    """Whether a release satisfies bounds like ">=2.11,<2.14"."""
    have = _numbers(version)
    for bound in filter(None, wanted.split(",")):
        least, most = bound.startswith(">="), bound.startswith("<")
        if (least and have < _numbers(bound)) or (most and have >= _numbers(bound)):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    """The release's numbers: of 2.13.0+cpu (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted(package: str) -> str:
    try:
        requirements = importlib.metadata.requires("swarmnode") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = (re.fullmatch(rf"{package}\b\s*([^;]*?)\s*(;.*)?", text) for text in requirements)
    return next((match[1].replace(" ", "") for match in found if match), "")


def memory(available_bytes: int) -> Finding:
    text = f"{available_bytes / GIB:.1f} GiB available"
    fix = "close other programs, or add this machine only for what --memory lets it take"
    status: Status = "fail" if available_bytes < MEMORY_FAIL else "warn" if available_bytes < MEMORY_WARN else "pass"
    return Finding("memory", status, text, "" if status == "pass" else fix)


def disk(settings: Settings) -> Iterator[Finding]:
    for variable, path in (
        ("SWARM_DATA_DIR", settings.data_dir),
        ("SWARM_FELLOW_MODEL_CACHE", settings.model_cache),
        ("SWARM_SERVABLE_MODELS_ROOT", settings.models_root),
    ):
        yield disk_at(path, variable)


def disk_at(path: Path, variable: str) -> Finding:
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            "disk", "fail", f"{there} is not writable", f"make it yours, or set {variable} to another folder"
        )
    free = shutil.disk_usage(there).free
    status: Status = "fail" if free < DISK_FAIL else "warn" if free < DISK_WARN else "pass"
    fix = "" if status == "pass" else f"free some, or set {variable} to a folder on another disk"
    return Finding("disk", status, f"{free / GIB:.0f} GiB free at {path}", fix)


def ports(patient: Patient) -> Iterator[Finding]:
    """What a running node bound is open; what the next start will bind is free."""
    node = patient.node
    if patient.running and node is not None:
        yield _open_port("swarm port", node.swarm)
        if node.api is not None:
            yield _open_port("API port", re.sub(r"^https?://", "", node.api))
    elif node is not None:
        yield free_port("swarm port", node.wanted, "fail", SWARM_FIX)
        if node.api is not None:
            yield free_port("API port", re.sub(r"^https?://", "", node.api), "fail", API_FIX)
    else:  # nobody has said yet what this machine is to be: only a coordinator takes these ports by itself
        yield free_port("swarm port", SWARM_LISTEN, "warn", SWARM_FIX)
        yield free_port("API port", API_LISTEN, "warn", API_FIX)


def _open_port(what: str, text: str) -> Finding:
    address = parse_address(text)
    here = reachable_here(address)
    try:
        with socket.create_connection((here.host, here.port), timeout=CONNECT_S):
            return Finding(what, "pass", f"{address} is open")
    except OSError as error:
        fix = "restart the node; if that does not help, a firewall of this machine keeps its own programs out"
        return Finding(what, "fail", f"the node runs, but {address} cannot be reached: {error}", fix)


def free_port(what: str, text: str, status: Status, fix: str) -> Finding:
    address = parse_address(text)
    try:
        family, kind, _, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        return Finding(what, status, f"{address} cannot be bound: {error.strerror or error}", fix)
    return Finding(what, "pass", f"{address} is free")


# -- the swarm


def _membership(data_dir: Path) -> tuple[NodeIdentity | None, Membership | None]:
    """Read only: a doctor makes no key."""
    if not (data_dir / FOLDER / KEY).exists():
        return None, None
    identity = NodeIdentity.open(data_dir)
    return identity, identity.membership()


def certificate(identity: NodeIdentity | None, member: Membership | None, now: float) -> Iterator[Finding]:
    if identity is None or member is None:
        fix = (
            "start it with `swarmnode up --role coordinator`, or with --role peer and a token of `swarmnode join-token`"
        )
        yield Finding("certificate", "warn", "this machine belongs to no swarm yet", fix)
        return
    again = "run `swarmnode join-token` on the coordinator and start this node with --join TOKEN"
    try:
        about = certs.check_issued(member.certificate, member.ca, now)
    except SwarmError as error:
        yield Finding("certificate", "fail", error.message, f"set this machine's clock if it is wrong; if not, {again}")
        return
    days = (about.ends_s - now) / 86_400
    text = f"node {about.node[:8]}, {', '.join(about.roles)}, {days:.0f} more days"
    if days < CERTIFICATE_DAYS:
        fix = f"leave the node running while the coordinator is up, so that it renews itself; or {again}"
        yield Finding("certificate", "warn", text, fix)
    else:
        yield Finding("certificate", "pass", text)


async def reachability(patient: Patient, identity: NodeIdentity, member: Membership) -> list[Finding]:
    """Whether the other machines reach this one; where the node does not run, this process stands in for it."""
    node = patient.node
    if node is None:
        return [Finding("reachability", "warn", "not tried: this node never ran", "start it with `swarmnode up`")]
    tls = SwarmTls(identity.files)
    if patient.running:
        return await _ask(patient, node, identity, member, tls, node.advertised)
    async with open_flat_nursery() as nursery:
        about = _identity(identity, member, node.advertised)
        try:
            bound = await nursery.start(_stand_in, tls, parse_address(node.wanted), about)
        except (SwarmError, OSError):
            return []  # the port's own finding says why
        moved = parse_address(node.wanted).port == 0 and node.advertised == node.swarm
        found = await _ask(patient, node, identity, member, tls, str(bound) if moved else node.advertised)
        nursery.cancel_scope.cancel()
    return found


async def _stand_in(tls: SwarmTls, wanted: Address, about: Identity, *, task_status: trio.TaskStatus[Address]) -> None:
    async def refuse(kind: str, hello: Hello, channel: Channel) -> None:
        raise LinkBroken("only `swarmnode doctor` runs here at the moment")

    await DirectTransport(tls).listen(wanted, refuse, about, task_status=task_status)


async def _ask(
    patient: Patient, node: RunningNode, identity: NodeIdentity, member: Membership, tls: SwarmTls, advertised: str
) -> list[Finding]:
    if node.coordinates:
        return [await _own_address(tls, advertised, identity)]
    about = _identity(identity, member, advertised)
    roads = Roads(DirectTransport(tls), about, identity.key, patient.settings.link_routes, member.coordinators)
    try:
        with trio.fail_after(COORDINATOR_S):
            return await _dialed_back(patient, roads, about)
    except trio.TooSlowError:
        pass
    except SwarmError as error:
        return [Finding("coordinator", "fail", error.message, _mend(error))]
    return [Finding("coordinator", "fail", f"no answer within {COORDINATOR_S:g} s", UNREACHED_FIX)]


def _mend(error: SwarmError) -> str:
    """What helps against what a coordinator, or nobody, answered."""
    again = "run `swarmnode join-token` on the coordinator and start this machine with --join TOKEN and an empty"
    if isinstance(error, Conflict):
        return f"{again} --data-dir: each machine needs an identity of its own"
    if isinstance(error, NodeRemoved):
        return error.mend
    return UNREACHED_FIX


async def _own_address(tls: SwarmTls, advertised: str, identity: NodeIdentity) -> Finding:
    try:
        await reach(tls, parse_address(advertised), identity.node)
    except SwarmError as error:
        fix = (
            "give --advertise HOST:PORT with an address of this machine (some routers answer theirs from outside only)"
        )
        return Finding("reachability", "fail", f"{error.message}, tried from this machine", fix)
    return Finding(
        "reachability", "pass", f"{advertised} answers here; `swarmnode doctor` on a peer tries it from there"
    )


async def _dialed_back(patient: Patient, roads: Roads, about: Identity) -> list[Finding]:
    async with roads.to_coordinator("control") as dialed:
        channel, how = dialed.up, f"{dialed.way.name} answers"
        if dialed.way.route != DIRECT:
            how += f" ({dialed.way.route}: its swarm port cannot be reached from here)"
        sent_s = patient.clock()
        await channel.send(Frame("dial_back", {}))
        async for frame in channel:
            if frame.kind == "dialed_back":
                break
        else:
            raise LinkBroken("the coordinator hung up; does it run an older version?")
        speaks = "" if channel.welcome is None else f", protocol {channel.welcome.protocol}"
    header = frame.header
    steady = "" if _chosen_port(patient) else "start the node with --swarm-listen HOST:PORT, its port is random now; "
    fix = (
        f"{steady}let {about.listen[0]} through this machine's firewall, forward the port on its router, or give "
        "--advertise HOST:PORT as the coordinator sees this machine"
    )
    return [
        Finding("coordinator", "pass", f"{how}{speaks}"),
        _reachability(patient, header["message"], fix, reached=header["ok"]),
        clock_finding(sent_s, patient.clock(), header["time_s"]),
    ]


def _chosen_port(patient: Patient) -> int:
    """The swarm port that the node was told to take; 0: any."""
    return 0 if patient.node is None else parse_address(patient.node.wanted).port


def _reachability(patient: Patient, text: str, fix: str, *, reached: bool) -> Finding:
    """A machine that nobody can dial still serves through the coordinator, unless that was forbidden."""
    if reached:
        return Finding("reachability", "pass", text)
    if RELAYED in patient.settings.link_routes:
        return Finding("reachability", "warn", f"{text}; its stages' links go through the coordinator, slower", fix)
    return Finding("reachability", "fail", text, fix)


def clock_finding(sent_s: float, received_s: float, theirs_s: float) -> Finding:
    """Their time was taken between our two, so that a dial that took seconds is no difference."""
    off_s = max(sent_s - theirs_s, theirs_s - received_s, 0.0)
    text = f"within {max(off_s, 1):.0f} s of the coordinator's"
    fix = "set both machines' clocks by the network (timedatectl set-ntp true)"
    if off_s > CLOCK_WARN_S:
        return Finding("clock", "fail" if off_s > CLOCK_FAIL_S else "warn", f"{off_s:.0f} s off the coordinator's", fix)
    return Finding("clock", "pass", text)


def _identity(identity: NodeIdentity, member: Membership, advertised: str) -> Identity:
    roles = member.about.roles
    return Identity(identity.node, BootId(uuid.uuid4().hex), "doctor", roles, listen=(advertised,))
