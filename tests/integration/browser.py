"""A headless Chromium driven over its debugging pipe: standard library only, no port."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

EXECUTABLE = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-extensions", "--no-first-run",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page in one browser; collects what it logs and what it asks for."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._write_fd = os.pipe()
        self._read_fd, from_browser = os.pipe()
        words = [str(EXECUTABLE), *ARGUMENTS, f"--user-data-dir={profile}"]
        # Chromium reads descriptor 3 and writes descriptor 4; the shell puts the pipes there.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *words],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events on the way are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read_fd, 65536)
            assert piece, "the browser went away"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path) -> None:
        """Load a file and wait until it is loaded."""
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, run by the debugger and not by the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Size of the window in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        """What the page is told the reader prefers: `light` or `dark`."""
        wish = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[wish])

    def move_to(self, x: float, y: float) -> None:
        """Put the pointer somewhere."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        """End the browser."""
        os.close(self._write_fd)
        os.close(self._read_fd)
        self._process.terminate()
        self._process.wait(20)
