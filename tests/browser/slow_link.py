"""A link to a server on which answers take a while, as from far away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 16
_GONE = (ConnectionError, ExceptionGroup)


class SlowLink:
    """Carries bytes both ways; those of the server arrive later, in order.

    Attributes:
        address: Of this end.
        delay_s: How much later, from now on.
    """

    def __init__(self, port: int) -> None:
        self.address = ""
        self.delay_s = 0.0
        self._port = port
        self._ready, self._done = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)

    def open(self) -> None:
        """Starts to carry."""
        self._thread.start()
        assert self._ready.wait(60)

    def close(self) -> None:
        """Carries no more."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"http://localhost:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._done.wait()
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("localhost", self._port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, to_server, later=False))
                group.create_task(self._carry(from_server, writer, later=True))
        except (asyncio.CancelledError, *_GONE):
            pass  # the end of this link, or of one that it joins
        finally:
            writer.close()
            to_server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, later: bool) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deliver(waiting, writer))
            data = b"-"
            while data:
                data = await reader.read(_CHUNK_BYTES)
                waiting.put_nowait((time.monotonic() + (self.delay_s if later else 0.0), data))

    @staticmethod
    async def _deliver(waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        data = b"-"
        while data:
            at_s, data = await waiting.get()
            await asyncio.sleep(at_s - time.monotonic())
            writer.write(data)
            await writer.drain()
        writer.close()


@contextmanager
def slow_link(url: str) -> Iterator[SlowLink]:
    """A link to a server."""
    link = SlowLink(urlsplit(url).port or 80)
    link.open()
    try:
        yield link
    finally:
        link.close()
