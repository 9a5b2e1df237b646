"""Process: a handle of the process at the other end of a unix socket, so that no other is killed instead."""

from __future__ import annotations

import os
import signal
import socket
import struct
import weakref
from contextlib import suppress

CREDENTIALS = struct.Struct("3i")
"""Ids of process, user and group, from the kernel."""


class Process:
    """A process of this machine, identified by the kernel.

    An id alone may be another machine's, or reused by the time of a signal; a descriptor never is.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    @classmethod
    def of(cls, connection: socket.socket, session: int | None) -> Process | None:
        """Return the peer of a unix socket if it is in `session`, else None."""
        if connection.family != socket.AF_UNIX or session is None or not hasattr(os, "pidfd_open"):
            return None
        pid = CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )[0]
        with suppress(OSError):
            process = cls(pid)  # before the check: from now on its id is not reused
            return process if os.getsid(pid) == session else None
        return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
