"""End a tmux server that a test started, without leaving its socket behind."""

import os
import subprocess
from pathlib import Path


def socket_path(name: str) -> Path:
    """Where tmux puts the socket of this name."""
    return Path(os.environ.get("TMUX_TMPDIR", "/tmp"), f"tmux-{os.getuid()}", name)


def end_server(name: str) -> None:
    """End the server, if it runs, and remove its socket, which tmux itself leaves."""
    subprocess.run(["tmux", "-L", name, "kill-server"], capture_output=True, check=False)
    socket_path(name).unlink(missing_ok=True)
