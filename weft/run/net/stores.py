"""Stores: rendezvous of ranks, without listening beyond loopback and without unpickling.

torch's TCPStore listens on all interfaces unless it gets a socket, and any client may read and write it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from torch.distributed import FileStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]


def file_store(path: str | Path, world: int) -> FileStore:
    """Return a store in a file, for ranks of one machine; each generation of ranks needs a new file."""
    return FileStore(str(path), world)


def serve_store(listening: socket.socket) -> TCPStore:
    """Return a store that is served at a listening socket, and so on that address only."""
    host, port = listening.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
    )


def open_store(port: int) -> TCPStore:
    """Return a client of the store at a port on loopback, which may be a `weft.run.net.listener.Tunnel`."""
    return TCPStore("127.0.0.1", port, is_master=False)
