"""TLS for channels between machines: a certificate, and a connection that two threads may share."""

from __future__ import annotations

import datetime
import hashlib
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import InputError

CERTIFICATE_DAYS = 3650


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """PEM files of a certificate and its private key."""

    cert: Path
    key: Path

    def fingerprint(self) -> bytes:
        """Return the SHA-256 of the first certificate of the file, which is the server's own."""
        pem = self.cert.read_text()
        begin, end = (pem.index(f"-----{word} CERTIFICATE-----") for word in ("BEGIN", "END"))
        return hashlib.sha256(
            ssl.PEM_cert_to_DER_cert(f"{pem[begin:end]}-----END CERTIFICATE-----\n")
        ).digest()


class TLSSocket:
    """A TLS connection that one thread may read while another writes; `ssl.SSLSocket` does not allow it."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._state, self._sending = threading.Lock(), threading.Lock()
        self.family, self.fileno, self.close = connection.family, connection.fileno, connection.close
        self.settimeout, self.setsockopt = connection.settimeout, connection.setsockopt
        self.shutdown = connection.shutdown

    def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
                continue
            finally:
                self._flush()
            return

    def peer_certificate(self) -> bytes:
        return self._tls.getpeercert(binary_form=True) or b""

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), 2**20):
            # One lock from encrypting to sending: records must leave in the order in which they were made.
            with self._sending:
                with self._state:
                    self._tls.write(view[start : start + 2**20])
                    record = self._outgoing.read()
                self._socket.sendall(record)

    def recv(self, size: int) -> bytes:
        while True:
            with self._state:
                try:
                    return self._tls.read(size)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return b""
            self._fill()

    def _fill(self) -> None:
        data = self._socket.recv(2**16)
        with self._state:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        with self._sending, self._state:
            record = self._outgoing.read()
            if record:
                self._socket.sendall(record)


def self_signed(folder: Path) -> Certificate:
    """Write a fresh self-signed certificate and its key into `folder`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weft")])
    lifetime = datetime.timedelta(days=CERTIFICATE_DAYS)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + lifetime)
    certificate = Certificate(cert=folder / "cert.pem", key=folder / "key.pem")
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    certificate.cert.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    certificate.key.touch(mode=0o600)
    certificate.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return certificate


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """Return the server's context; raise InputError if the files are not a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no connection is resumed
    try:
        # An empty password: without one OpenSSL prompts at the terminal, and waits.
        context.load_cert_chain(certificate.cert, certificate.key, password="")
        certificate.fingerprint()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InputError(
            f"--tls-cert {certificate.cert} and --tls-key {certificate.key} cannot be used: {error}.",
            hint="Pass a certificate and its private key, without a password, as PEM files, or neither.",
        ) from error
    return context


def client_context() -> ssl.SSLContext:
    """Return a context that accepts any certificate: `secure` binds its proof to the peer's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
