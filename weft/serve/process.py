"""Process: the one at the other end of a unix socket, held so that no other is ever killed in its place."""

from __future__ import annotations

import os
import signal
import socket
import struct
import weakref
from contextlib import suppress
from typing import Any

CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as the kernel tells them."""


class Process:
    """A process of this machine, known by the kernel's word and not by its own.

    A number alone may be another machine's, or used again by the time of a signal; a descriptor never is.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    @classmethod
    def of(cls, connection: Any, session: int | None) -> Process | None:
        """Return the peer of a unix socket, if it is in `session`; None for whatever else connects."""
        if connection.family != socket.AF_UNIX or session is None or not hasattr(os, "pidfd_open"):
            return None
        pid = CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )[0]
        with suppress(OSError):
            process = cls(pid)  # first: from now on its number is not used again unnoticed
            return process if os.getsid(pid) == session else None
        return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
