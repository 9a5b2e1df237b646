"""Stores: rendezvous of ranks, without listening beyond loopback and without unpickling.

torch's TCPStore listens on all interfaces unless it gets a socket, and any client may read and write it.
"""

from __future__ import annotations

import os
import socket

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def serve_store(listening: socket.socket) -> TCPStore:
    """Return a store that is served at a listening socket, and so on that address only."""
    host, port = listening.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
    )


def open_store(port: int) -> TCPStore:
    """Return a client of the store at a port on loopback, which may be a `weft.run.net.listener.Tunnel`."""
    return TCPStore("127.0.0.1", port, is_master=False)
