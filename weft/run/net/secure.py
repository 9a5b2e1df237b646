"""Secure channels: both ends prove that they have a shared token, bound to the server's TLS certificate.

    server   channel, purpose = accept(connection, Credentials(token, context, fingerprint))
    client   channel = connect(("10.0.0.1", 29500), token, purpose="rank")

Each end sends a nonce and an HMAC of both nonces and the certificate's fingerprint, keyed with the token. The
token is not sent, and proofs that are relayed with another certificate are refused, so the certificate may be
self-signed. Inside one machine a channel is a unix socket in a 0700 folder, without TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from weft.core.errors import CommError
from weft.run.net.channel import Channel, Closed, shutdown
from weft.run.net.tls import Certificate, TLSSocket, client_context, server_context

HANDSHAKE_SECONDS = 10.0
"""From connecting to the end of the proof; slower connections are dropped."""
HANDSHAKE_LIMITS = (4096, 0)
"""Bytes of JSON and of payload that are read from an unauthenticated peer."""
RETRY_SECONDS = 0.2
MISMATCH = "the tokens differ, or the connection is relayed with another certificate"
Address = tuple[str, int] | str
"""(host, port), or the path of a unix socket."""


class ProofError(CommError):
    """The proof of a peer does not match: it has another token, or sees another certificate."""


@dataclass(frozen=True)
class Credentials:
    """The token and certificate of a server; without a certificate its connections are unix sockets."""

    token: str
    context: ssl.SSLContext | None = None
    fingerprint: bytes = b""

    @classmethod
    def of(cls, token: str, certificate: Certificate) -> Credentials:
        return cls(token, server_context(certificate), certificate.fingerprint())


def accept(connection: socket.socket, credentials: Credentials) -> tuple[Channel, str]:
    """Return the channel of an accepted connection and the purpose that its peer states.

    Close the connection and raise CommError if the peer does not prove itself within `HANDSHAKE_SECONDS`.
    """
    with _handshake(connection, "a client"):
        stream: Any = connection
        if credentials.context is not None:
            stream = TLSSocket(connection, credentials.context, server=True)
            stream.handshake()
        channel, ours = Channel(stream), secrets.token_bytes(32)
        channel.send({"weft": 1, "nonce": ours.hex()})
        answer, _ = channel.receive(HANDSHAKE_LIMITS)
        theirs = bytes.fromhex(str(answer.get("nonce")))
        proof = _proof(credentials.token, "client", (ours, theirs), credentials.fingerprint)
        if not _matches(answer, proof):
            channel.send({"refused": MISMATCH})
            raise ProofError(f"A connection was refused: {MISMATCH}.")
        channel.send({"proof": _proof(credentials.token, "server", (ours, theirs), credentials.fingerprint)})
        channel.limit_sends()
        return channel, str(answer.get("purpose"))


def connect(address: Address, token: str, purpose: str, *, patience: float = 0.0) -> Channel:
    """Return a channel to the server at `address`, which has proved that it has the token.

    Retry for `patience` seconds while no server answers. Raise `ProofError` if the proofs do not match.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return _connect(address, token, purpose)
        except Closed:
            if time.monotonic() >= until:
                raise
            time.sleep(RETRY_SECONDS)


def _connect(address: Address, token: str, purpose: str) -> Channel:
    name = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    try:
        if isinstance(address, str):
            with ExitStack() as on_error:
                connection = on_error.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(address)
                on_error.pop_all()
        else:
            connection = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
    except OSError as error:
        raise Closed(f"No server answers at {name}: {error}.") from error
    with _handshake(connection, f"the server at {name}"):
        stream, fingerprint = connection, b""
        if not isinstance(address, str):
            stream = TLSSocket(connection, client_context(), server=False)
            stream.handshake()
            fingerprint = hashlib.sha256(stream.peer_certificate()).digest()
        channel, ours = Channel(stream), secrets.token_bytes(32)
        theirs = bytes.fromhex(str(channel.receive(HANDSHAKE_LIMITS)[0].get("nonce")))
        proof = _proof(token, "client", (theirs, ours), fingerprint)
        channel.send({"nonce": ours.hex(), "proof": proof, "purpose": purpose})
        answer, _ = channel.receive(HANDSHAKE_LIMITS)
        if "refused" in answer:
            raise ProofError(f"The server at {name} refuses this connection: {MISMATCH}.")
        if not _matches(answer, _proof(token, "server", (theirs, ours), fingerprint)):
            raise ProofError(f"The server at {name} does not have the token.")
        return channel


@contextmanager
def _handshake(connection: socket.socket, peer: str) -> Generator[None]:
    """Bound a handshake in time, and close the connection if it fails.

    With a timer, because a socket's own time-out restarts with each byte that arrives.
    """
    late = threading.Timer(HANDSHAKE_SECONDS, shutdown, (connection,))
    late.daemon = True
    late.start()
    try:
        yield
    except BaseException as error:
        shutdown(connection)
        connection.close()
        if isinstance(error, OSError | ValueError):
            raise Closed(f"The handshake with {peer} failed: {error}.") from error
        raise
    finally:
        late.cancel()


def _proof(token: str, role: str, nonces: tuple[bytes, bytes], fingerprint: bytes) -> str:
    message = b"|".join((b"weft 1", role.encode(), *(nonce.hex().encode() for nonce in nonces), fingerprint))
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def _matches(answer: dict[str, Any], proof: str) -> bool:
    return hmac.compare_digest(str(answer.get("proof")).encode(), proof.encode())
