"""A TCP proxy before a real Redis, that answers late or cuts connections in the middle of what they carry."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

_CHUNK = 1 << 16


@dataclass
class Proxy:
    """Forwards to the Redis at `upstream` (a URL). Its faults may be changed at any time.

    `delay_seconds`  each answer comes so late
    `cut_share`      this share of all chunks, of requests and of answers, ends after a random number of its
                     bytes, and the connection with it; `cuts` counts them
    """

    upstream: str
    port: int = 0
    delay_seconds: float = 0.0
    cut_share: float = 0.0
    random: Random = field(default_factory=Random)
    cuts: int = 0
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until either side closes it or a fault cuts it."""
        address = urlsplit(self.upstream)
        try:
            answers, requests = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            writer.transport.abort()
            return
        ways = [self._carry(reader, requests, 0), self._carry(answers, writer, 1)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        self.open |= {writer, requests}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self.open -= {writer, requests}
        for end in (writer, requests):
            end.transport.abort()
        await asyncio.wait(tasks)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, answers: int) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                if answers and self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                cut = self.random.random() < self.cut_share
                target.write(data[: self.random.randrange(len(data))] if cut else data)
                await target.drain()
                if cut:
                    self.cuts += 1
                    await asyncio.sleep(0)  # what was written leaves before the connection is aborted
                    return


@contextmanager
def proxied(upstream: str, seed: int = 0) -> Iterator[Proxy]:
    """Run a proxy before the Redis at `upstream`."""
    proxy = Proxy(upstream, random=Random(seed))
    started, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        started.set()
        await ended.wait()
        server.close()
        for end in list(proxy.open):
            end.transport.abort()
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=2)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    started.wait(5)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(5)
        loop.close()
