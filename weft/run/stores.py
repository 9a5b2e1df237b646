"""Stores by which ranks find each other. None of them listens beyond loopback, and none unpickles anything.

torch's TCPStore listens on all interfaces unless it is given a socket, and whoever reaches it may read and
write it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]


def file_store(path: str | Path, world: int) -> Any:
    """Return a store in a file, for ranks of one machine; each generation of ranks needs a new file."""
    return FileStore(str(path), world)


def serve_store(listening: socket.socket) -> Any:
    """Return a store that is served at a socket which listens already, and so on that address only."""
    host, port = listening.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
    )


def open_store(port: int) -> Any:
    """Return a client of the store at a port on loopback, which may be a `weft.run.listener.Tunnel`."""
    return TCPStore("127.0.0.1", port, is_master=False)
