"""End a tmux server that a test started, without leaving its socket behind."""

import os
import subprocess
from pathlib import Path


def socket_path(name: str, folder: str = "") -> Path:
    """Where tmux puts the socket of this name; `folder` stands for TMUX_TMPDIR."""
    parent = folder or os.environ.get("TMUX_TMPDIR", "/tmp")
    return Path(parent, f"tmux-{os.getuid()}", name)


def end_server(name: str, folder: str = "") -> None:
    """End the server, if it runs, and remove its socket, which tmux itself leaves."""
    path = socket_path(name, folder)
    subprocess.run(["tmux", "-S", path, "kill-server"], capture_output=True, check=False)
    path.unlink(missing_ok=True)
