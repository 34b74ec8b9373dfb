"""A TCP proxy for bad links: it delays, stalls, or cuts after so many bytes from the server."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_PIECE = 16_384


@dataclass
class Proxy:
    """One listening port in front of another; its faults may be changed at any time.

    Attributes:
        target_port: Port behind it.
        delay_s: Wait before each piece in each direction.
        cut_after: Bytes from the server after which each connection is cut; None never.
        is_stalled: Nothing passes, and nobody is told.
        is_refusing: New connections are closed at once.
        port: Port it listens on.
        connections: How many were made.
    """

    target_port: int
    delay_s: float = 0.0
    cut_after: int | None = None
    is_stalled: bool = False
    is_refusing: bool = False
    port: int = 0
    connections: int = 0
    from_server: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._writers += [writer, server_writer]
        up = self._copy(reader, server_writer, is_down=False)
        down = self._copy(server_reader, writer, is_down=True)
        with contextlib.suppress(asyncio.CancelledError):  # the end of the proxy
            await asyncio.gather(up, down)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_down: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                while self.is_stalled:
                    await asyncio.sleep(0.02)
                if is_down:
                    self.from_server += len(piece)
                    if self.cut_after is not None and self.from_server > self.cut_after:
                        self._cut()
                        return
                writer.write(piece)
                await writer.drain()
        writer.close()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def cut(self) -> None:
        """Reset every connection now."""
        self._loop.call_soon_threadsafe(self._cut)

    def cut_in(self, num_bytes: int) -> None:
        """Cut once so many more bytes have come from the server."""
        self.cut_after = self.from_server + num_bytes


@contextmanager
def tcp_proxy(target_port: int) -> Iterator[Proxy]:
    """Run a proxy in a thread of its own."""
    proxy = Proxy(target_port)
    loop = proxy._loop
    server = loop.run_until_complete(asyncio.start_server(proxy._serve, "127.0.0.1", 0))
    proxy.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(_end(server, proxy), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end(server: asyncio.Server, proxy: Proxy) -> None:
    server.close()
    proxy.is_stalled = False
    proxy._cut()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
