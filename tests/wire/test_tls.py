"""Mutual TLS on the swarm port, and everybody who is not let in: no handshake, no HELLO, no channel."""

from __future__ import annotations

import ssl
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from channel_handlers import echo
from credentials import Node, Swarm
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from swarmnode.errors import LinkBroken, NodeRemoved, ProtocolError, SwarmError
from swarmnode.ids import NodeId
from swarmnode.wire import certificates as certs
from swarmnode.wire import direct, limits, tls
from swarmnode.wire.address import Address
from swarmnode.wire.crowd import Crowd
from swarmnode.wire.deadlines import JOIN_S, TLS_S
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame, encode_bytes
from swarmnode.wire.link import CHANNEL_KINDS, JOIN_KIND, LinkOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello

ANYWHERE = Address("127.0.0.1", 0)
BOTH = ("coordinator", "peer")


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path / "swarm")


class Listener:
    """A node that listens, with what its handler saw."""

    def __init__(self, node: Node, *, enrolment: bool = False) -> None:
        self.node = node
        self.tls = node.tls(enrolment=enrolment)
        self.transport = DirectTransport(self.tls)
        self.served: list[tuple[str, NodeId]] = []
        self.address = ANYWHERE

    async def handle(self, kind: str, hello: Hello, channel: Channel) -> None:
        self.served.append((kind, hello.identity.node))
        await echo(kind, hello, channel)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Listener]:
        async with trio.open_nursery() as nursery:
            listen = partial(self.transport.listen, ANYWHERE, self.handle, self.node.identity)
            self.address = await nursery.start(listen)
            yield self
            nursery.cancel_scope.cancel()


async def talk(listener: Listener, member: Node, kind: str = "steps", /, **identity: object) -> None:
    """A link comes up and carries a frame, or raises."""
    who = replace(member.identity, **identity)  # type: ignore[arg-type]
    with trio.fail_after(10):
        async with DirectTransport(member.tls()).dial(listener.address, kind, who) as channel:
            await channel.send(Frame("end", {"session": 5}))
            assert (await channel.receive()).header["session"] == 5


async def still_serves(listener: Listener, swarm: Swarm) -> None:
    """Whatever happened, another node is served."""
    served = len(listener.served)
    await talk(listener, swarm.node(f"friend-{time.monotonic_ns()}"))
    assert len(listener.served) == served + 1


# -- who gets in


async def test_two_nodes_of_a_swarm_link_up_over_tls_1_3(swarm: Swarm) -> None:
    attic, cellar = swarm.node("attic"), Listener(swarm.node("cellar", BOTH))
    seen: list[tuple[str, str | None, str | None]] = []
    shake = tls._shake

    async def note(stream: trio.SSLStream[trio.abc.Stream]) -> bytes | None:
        der = await shake(stream)
        seen.append((str(stream._tls.version()), stream.selected_alpn_protocol(), str(stream._tls.cipher()[0])))
        return der

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls, "_shake", note)
        async with cellar.listening():
            for kind in CHANNEL_KINDS:
                await talk(cellar, attic, kind)
    assert {(version, alpn) for version, alpn, _ in seen} == {("TLSv1.3", "swarmnode/1")}
    assert len(seen) == 2 * len(CHANNEL_KINDS)
    assert cellar.served == [(kind, attic.node) for kind in CHANNEL_KINDS]


async def test_a_large_frame_passes_whole(swarm: Swarm) -> None:
    attic, cellar = swarm.node("attic"), Listener(swarm.node("cellar"))
    frame = Frame("data", {"offset": 0}, bytes(range(256)) * 4096)
    async with (
        cellar.listening(),
        DirectTransport(attic.tls()).dial(cellar.address, "steps", attic.identity) as channel,
    ):
        for _ in range(8):
            await channel.send(frame)
        for _ in range(8):
            assert await channel.receive() == frame


async def test_no_plain_byte_of_a_frame_is_on_the_wire(swarm: Swarm) -> None:
    attic, cellar = swarm.node("attic"), Listener(swarm.node("cellar"))
    carried = bytearray()
    async with cellar.listening(), trio.open_nursery() as nursery:

        async def tap(near: trio.SocketStream) -> None:
            far = await trio.open_tcp_stream(cellar.address.host, cellar.address.port)
            async with near, far, trio.open_nursery() as both:
                for source, sink in ((near, far), (far, near)):
                    both.start_soon(copy, source, sink)

        async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            async for data in source:
                carried.extend(data)
                await sink.send_all(data)

        (socket,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, tap, [socket])
        tapped = Address(*socket.socket.getsockname()[:2])
        async with DirectTransport(attic.tls()).dial(tapped, "steps", attic.identity) as channel:
            await channel.send(Frame("data", {"offset": 0}, b"the prompt of a person" * 10))
            assert len((await channel.receive()).body) == 220
        nursery.cancel_scope.cancel()
    assert len(carried) > 1000
    assert b"prompt" not in carried
    assert str(attic.node).encode() not in carried


# -- who does not


def stranger(swarm: Swarm) -> Node:
    other = Swarm(swarm.folder / "other").node("stranger")
    other.files.ca.write_bytes(certs.to_pem(swarm.ca))  # it would trust us
    return other


def expired(swarm: Swarm) -> Node:
    return swarm.node("expired", now=time.time() - 31 * 86_400)


def not_yet(swarm: Swarm) -> Node:
    return swarm.node("early", now=time.time() + 86_400)


def self_signed(swarm: Swarm) -> Node:
    key = certs.new_key()
    return swarm.write("self", key, certs.issue(swarm.ca, key, key.public_key(), BOTH, time.time()), BOTH)


def signed_by_a_peer(swarm: Swarm) -> Node:
    peer, key = swarm.node("insider"), certs.new_key()
    forged = certs.issue(peer.certificate, peer.key, key.public_key(), BOTH, time.time())
    node = swarm.write("forged", key, forged, BOTH)
    chain = certs.to_pem(forged) + certs.to_pem(peer.certificate)
    node.files.certificate.write_bytes(chain)
    return node


def builder_like_ours(swarm: Swarm) -> tuple[x509.CertificateBuilder, certs.PrivateKey]:
    """A certificate of ours but for its serial number, and its key; whoever asks adds to it, and signs."""
    key = certs.new_key()
    real = certs.issue(swarm.ca, swarm.key, key.public_key(), ("peer",), time.time())
    builder = x509.CertificateBuilder(
        real.issuer, real.subject, real.public_key(), 7, real.not_valid_before_utc, real.not_valid_after_utc
    )
    return builder, key


def for_servers_only(swarm: Swarm) -> Node:
    """Somebody else's use of our CA: not for what it is presented for."""
    builder, key = builder_like_ours(swarm)
    usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    return swarm.write("server", key, builder.add_extension(usage, critical=True).sign(swarm.key, hashes.SHA256()), ())


def naming(swarm: Swarm, name: str, hosts: int) -> Node:
    """Of our CA, with so many names of hosts in it."""
    builder, key = builder_like_ours(swarm)
    names = [x509.DNSName(f"{number:060}.example") for number in range(hosts)]
    certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return swarm.write(name, key, certificate.sign(swarm.key, hashes.SHA256()), ())


def oversized(swarm: Swarm) -> Node:
    """Larger than a handshake may carry."""
    return naming(swarm, "huge", 3000)


def larger_than_ours(swarm: Swarm) -> Node:
    """Small enough for a handshake, larger than any of ours."""
    return naming(swarm, "big", 100)


OUTSIDERS = [stranger, expired, not_yet, self_signed, signed_by_a_peer, for_servers_only, oversized, larger_than_ours]


@pytest.mark.parametrize("enrolment", [False, True])
@pytest.mark.parametrize("outsider", OUTSIDERS)
async def test_no_handler_ever_sees_an_outsider(
    swarm: Swarm, outsider: Callable[[Swarm], Node], enrolment: bool
) -> None:
    """Not even where a client may come without a certificate: a bad one is worse than none."""
    async with Listener(swarm.node("cellar", BOTH), enrolment=enrolment).listening() as cellar:
        for kind in ("steps", JOIN_KIND):
            with pytest.raises(LinkBroken):
                await talk(cellar, outsider(Swarm(swarm.folder / kind, swarm.key)), kind)
        assert cellar.served == []
        await still_serves(cellar, swarm)


@pytest.mark.parametrize("listener", [stranger, expired, self_signed, signed_by_a_peer])
async def test_a_dialer_says_nothing_to_a_false_listener(swarm: Swarm, listener: Callable[[Swarm], Node]) -> None:
    attic = swarm.node("attic")
    async with Listener(listener(swarm)).listening() as false:
        with pytest.raises(LinkBroken, match=r"handshake failed.*certificate"):
            await talk(false, attic)
        assert false.served == []


async def test_a_refused_clients_handshake_succeeds_and_the_link_is_still_not_up(swarm: Swarm) -> None:
    """What TLS 1.3 does: the client is done before the server has seen its certificate. So HELLO and WELCOME decide."""
    outsider = stranger(swarm)
    async with Listener(swarm.node("cellar")).listening() as cellar:
        secured = await outsider.tls().secure_dialed(await direct.connect(cellar.address))
        assert secured.peer is not None
        assert secured.peer.node == cellar.node.node
        with pytest.raises(LinkBroken):
            async with direct.dial_over(secured.stream, "steps", outsider.identity):
                pytest.fail("the link came up")
        assert cellar.served == []


# -- without a certificate


def bare_context(**settings: object) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["swarmnode/1"])
    for name, value in settings.items():
        setattr(context, name, value)
    return context


async def handshake(listener: Listener, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    stream = trio.SSLStream(await direct.connect(listener.address), context, https_compatible=True)
    try:
        await stream.do_handshake()
    except trio.BrokenResourceError:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def ends(stream: trio.abc.Stream, within_s: float = 3) -> None:
    """The other end closes, having said nothing but HTTP/2's own frames at most."""
    with trio.fail_after(within_s), suppress(trio.BrokenResourceError):
        while await stream.receive_some(65536):
            pass
    await trio.aclose_forcefully(stream)


async def test_a_peers_port_takes_nobody_without_a_certificate(swarm: Swarm) -> None:
    async with Listener(swarm.node("den")).listening() as den:
        await ends(await handshake(den, bare_context()))
        for kind in (*CHANNEL_KINDS, JOIN_KIND):
            stream, _ = await tls.secure_unverified(await direct.connect(den.address))
            with pytest.raises(LinkBroken):
                async with direct.dial_over(stream, kind, den.node.identity):
                    pytest.fail("the link came up")
        assert den.served == []


async def test_without_a_certificate_there_is_one_join_channel_and_nothing_else(swarm: Swarm) -> None:
    outsider = Swarm(swarm.folder / "other").node("new")
    async with Listener(swarm.node("cellar", BOTH), enrolment=True).listening() as cellar:
        for kind in CHANNEL_KINDS:
            stream, _ = await tls.secure_unverified(await direct.connect(cellar.address))
            with pytest.raises(LinkBroken, match="refused"):
                async with direct.dial_over(stream, kind, outsider.identity):
                    pytest.fail("the link came up")
        assert cellar.served == []
        stream, listener = await tls.secure_unverified(await direct.connect(cellar.address))
        assert certs.read_certificate(certs.load_certificate(listener)).node == cellar.node.node
        async with direct.dial_over(stream, JOIN_KIND, outsider.identity) as channel:
            await channel.send(Frame("end", {"session": 1}))
            assert (await channel.receive()).kind == "end"
            with pytest.raises(LinkBroken, match="refused"):
                await second_channel(channel, "steps")
            with pytest.raises(LinkBroken, match="refused"):
                await second_channel(channel, JOIN_KIND)
        assert [kind for kind, _ in cellar.served] == [JOIN_KIND]


async def second_channel(channel: Channel, kind: str) -> None:
    second = channel._connection.open_channel(kind)  # type: ignore[attr-defined]
    await second.receive()


async def test_a_member_may_not_use_the_join_channel(swarm: Swarm) -> None:
    async with Listener(swarm.node("cellar", BOTH), enrolment=True).listening() as cellar:
        with pytest.raises(LinkBroken, match="refused"):
            await talk(cellar, swarm.node("attic"), JOIN_KIND)


async def test_a_joiner_may_send_small_frames_only(swarm: Swarm) -> None:
    outsider = Swarm(swarm.folder / "other").node("new")
    async with Listener(swarm.node("cellar", BOTH), enrolment=True).listening() as cellar:
        stream, _ = await tls.secure_unverified(await direct.connect(cellar.address))
        async with direct.dial_over(stream, JOIN_KIND, outsider.identity) as channel:
            await channel.send(Frame("data", {"offset": 0}, bytes(limits.MAX_JOIN_FRAME_BYTES)))
            with pytest.raises(ProtocolError, match="allowed are 1 to 16384"):
                await channel.receive()


async def test_a_joiner_that_dawdles_is_cut_off(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "JOIN_S", 0.3)
    outsider = Swarm(swarm.folder / "other").node("new")
    async with Listener(swarm.node("cellar", BOTH), enrolment=True).listening() as cellar:
        stream, _ = await tls.secure_unverified(await direct.connect(cellar.address))
        async with direct.dial_over(stream, JOIN_KIND, outsider.identity) as channel:
            with trio.fail_after(3), pytest.raises(LinkBroken):
                await channel.receive()
    assert JOIN_S <= 10


# -- the handshake itself


@pytest.mark.parametrize("protocols", [["h2"], ["swarmnode/2"], ["http/1.1", "swarmnode/0"], []])
async def test_another_alpn_is_hung_up_on(swarm: Swarm, protocols: list[str]) -> None:
    node = swarm.node("attic")
    context = bare_context()
    context.load_cert_chain(node.files.certificate, node.files.key)
    context.set_alpn_protocols(protocols)
    if not protocols:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(node.files.certificate, node.files.key)
    async with Listener(swarm.node("cellar")).listening() as cellar:
        await ends(await handshake(cellar, context))
        assert cellar.served == []
        await still_serves(cellar, swarm)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_1])
async def test_older_tls_is_refused(swarm: Swarm, version: ssl.TLSVersion) -> None:
    node = swarm.node("attic")
    context = bare_context(minimum_version=ssl.TLSVersion.TLSv1, maximum_version=version)
    context.load_cert_chain(node.files.certificate, node.files.key)
    async with Listener(swarm.node("cellar")).listening() as cellar:
        with pytest.raises(trio.BrokenResourceError):
            await handshake(cellar, context)
        await still_serves(cellar, swarm)


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(9000)])
async def test_half_a_handshake_is_closed_in_time(swarm: Swarm, first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TLS_S == 5
    monkeypatch.setattr(tls, "TLS_S", 0.3)
    async with Listener(swarm.node("cellar")).listening() as cellar:
        stream = await direct.connect(cellar.address)
        if first:
            await stream.send_all(first)
        await ends(stream)
        await still_serves(cellar, swarm)


async def test_a_handshake_byte_by_byte_is_bounded_in_all(swarm: Swarm, autojump_clock: object) -> None:
    """The deadline is for the whole handshake, not for the time since the last byte."""
    near, far = trio.testing.memory_stream_pair()
    raised: list[SwarmError] = []

    async def accept() -> None:
        try:
            await swarm.node("cellar").tls().secure_accepted(far)
        except SwarmError as error:
            raised.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        started = trio.current_time()
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
        with suppress(trio.BrokenResourceError):
            for number in range(500):
                await near.send_all(hello[number : number + 1])
                await trio.sleep(1)
        assert TLS_S <= trio.current_time() - started <= TLS_S + 2
    assert "within 5 s" in raised[0].message


async def test_silence_of_many_does_not_keep_a_friend_out(swarm: Swarm) -> None:
    async with Listener(swarm.node("cellar")).listening() as cellar:
        silent = [await direct.connect(cellar.address) for _ in range(40)]
        await still_serves(cellar, swarm)
        for stream in silent:
            await trio.aclose_forcefully(stream)


def test_a_crowd_leaves_room_for_others() -> None:
    crowd = Crowd(places=5, per_source=3)

    @contextmanager
    def places(count: int, source: str) -> Iterator[None]:
        scopes = [crowd.place(source) for _ in range(count)]
        for scope in scopes:
            scope.__enter__()
        yield
        for scope in scopes:
            scope.__exit__(None, None, None)

    with places(3, "attacker"):
        with pytest.raises(SwarmError, match="attacker"), crowd.place("attacker"):
            pytest.fail("a fourth place")
        with places(2, "friend"), pytest.raises(SwarmError), crowd.place("third"):
            pytest.fail("a sixth place")
    assert crowd._held.total() == 0
    assert not crowd._held


# -- HELLO and WELCOME


async def test_hello_must_name_the_certificates_node_and_roles(swarm: Swarm) -> None:
    attic, den = swarm.node("attic"), swarm.node("den")
    async with Listener(swarm.node("cellar", BOTH)).listening() as cellar:
        with pytest.raises(ProtocolError, match="certificate is that of"):
            await talk(cellar, attic, node=den.node)
        with pytest.raises(ProtocolError, match="certified as peer only"):
            await talk(cellar, attic, roles=("coordinator",))
        with pytest.raises(ProtocolError, match="certified as"):
            await talk(cellar, swarm.node("mute", ()), roles=())
        assert cellar.served == []
        await still_serves(cellar, swarm)


async def test_a_peer_cannot_pass_for_the_coordinator_nor_for_another_node(swarm: Swarm) -> None:
    attic, den = swarm.node("attic"), swarm.node("den")
    async with Listener(den).listening() as listener:
        for kind in ("control", "requests", "files"):
            with pytest.raises(ProtocolError, match="without the certificate for it"):
                await talk(listener, attic, kind)
        dial = DirectTransport(attic.tls()).dial
        with pytest.raises(LinkBroken, match="was expected"):
            async with dial(listener.address, "steps", attic.identity, LinkOptions(node=NodeId("f" * 32))):
                pytest.fail("the link came up")
        async with dial(listener.address, "steps", attic.identity, LinkOptions(node=den.node)) as channel:
            assert channel.certified is not None
    lying = replace(den, identity=replace(den.identity, node=attic.node))
    async with Listener(lying).listening() as listener:
        with pytest.raises(ProtocolError, match="certificate is that of"):
            await talk(listener, attic)


# -- removal


async def test_a_removal_cuts_live_links_at_both_ends_and_refuses_new_ones(swarm: Swarm) -> None:
    attic, den = swarm.node("attic"), swarm.node("den")
    async with Listener(swarm.node("cellar", BOTH)).listening() as cellar:
        theirs, ours = DirectTransport(attic.tls()), DirectTransport(den.tls())
        async with ours.dial(cellar.address, "steps", den.identity) as untouched:
            async with theirs.dial(cellar.address, "steps", attic.identity) as channel:
                cellar.tls.revoke(frozenset({attic.node}))
                with trio.fail_after(2), pytest.raises(LinkBroken):
                    await channel.receive()
            with pytest.raises(NodeRemoved, match="removed from the swarm"):
                await talk(cellar, attic)
            await untouched.send(Frame("end", {"session": 1}))
            assert (await untouched.receive()).kind == "end", "another node's link goes on"
            assert ours.tls is not None
            ours.tls.revoke(frozenset({cellar.node.node}))
            with trio.fail_after(2), pytest.raises(LinkBroken):
                await untouched.receive()
        with pytest.raises(ProtocolError, match="was removed"):
            async with ours.dial(cellar.address, "steps", den.identity):
                pytest.fail("the link came up")
        with trio.fail_after(2):
            while cellar.tls._live:  # noqa: ASYNC110 - the listener side ends by itself
                await trio.sleep(0.01)


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(swarm: Swarm) -> None:
    attic = swarm.node("attic")
    transport = DirectTransport(attic.tls())
    serials: list[int] = []

    async def note(kind: str, hello: Hello, channel: Channel) -> None:
        assert channel.certified is not None
        serials.append(channel.certified.serial)
        await echo(kind, hello, channel)

    cellar = Listener(swarm.node("cellar"))
    cellar.handle = note  # type: ignore[method-assign]
    async with cellar.listening(), transport.dial(cellar.address, "steps", attic.identity) as old:
        renewed = certs.issue(swarm.ca, swarm.key, attic.key.public_key(), ("peer",), time.time())
        attic.files.certificate.write_bytes(certs.to_pem(renewed))
        assert transport.tls is not None
        transport.tls.use(attic.files)
        async with transport.dial(cellar.address, "steps", attic.identity):
            pass
        await old.send(Frame("end", {"session": 1}))
        assert (await old.receive()).kind == "end"
    assert serials == [attic.certificate.serial_number, renewed.serial_number]


def test_frames_of_a_joiner_are_what_the_limit_is_for() -> None:
    request = certs.new_request(certs.new_key())
    assert len(request) < certs.MAX_CERTIFICATE_BYTES
    assert len(encode_bytes(Frame("join", {}, b"x" * (len(request) + 200)))) < limits.MAX_JOIN_FRAME_BYTES


async def test_whoever_was_removed_before_the_guard_began_is_cut_by_it(tmp_path: Path) -> None:
    """Between its handshake and the guard there are checkpoints."""
    swarm = Swarm(tmp_path)
    tls, attic = swarm.node("house").tls(), swarm.node("attic")
    tls.revoke(frozenset({attic.node}))
    with trio.fail_after(1), tls.until_revoked(attic.node):
        await trio.sleep_forever()
    assert tls._live == {}
