"""What a request handler needs: settings, store, ledger, queue, and the files and batches made of them."""

import os
import socket
from dataclasses import dataclass
from typing import Annotated, Self

from fastapi import Depends, Request

from api.keyring import Keyring
from jobs import store, traces
from jobs.accept import Acceptor
from jobs.batches import Batches
from jobs.files import Files
from jobs.ledger import Ledger
from jobs.queue import Producer
from jobs.quotas import Quotas
from jobs.settings import Settings

# Short, since somebody waits for the answer: a Redis that hangs becomes a 503 after four of these.
_REDIS_SECONDS = 1.5


@dataclass(frozen=True)
class Context:
    """The connections of one API process, shared by its threads."""

    settings: Settings
    store: store.ObjectStore
    ledger: Ledger
    queue: Producer
    files: Files
    batches: Batches
    quotas: Quotas
    acceptor: Acceptor
    keys: Keyring
    traces: traces.Traces

    @classmethod
    def connect(cls, settings: Settings) -> Self:
        """Connect to store and Redis; raise StoreUnreachable or RedisUnreachable if one does not answer."""
        objects = store.open_store(settings, hurried=True)
        objects.check()
        ledger = Ledger.connect(settings, _REDIS_SECONDS)
        files = Files(objects)
        batches = Batches(objects, ledger)
        quotas = Quotas(settings, ledger, files)
        acceptor = Acceptor(settings, objects, ledger, files, batches, quotas)
        queue, keys = Producer(settings), Keyring(objects)
        traced = traces.open_traces(settings, "longhaul-api", f"{socket.gethostname()}-{os.getpid()}")
        return cls(settings, objects, ledger, queue, files, batches, quotas, acceptor, keys, traced)

    def close(self) -> None:
        """Close the connections to Redis; send the last spans."""
        self.traces.close()
        self.queue.close()
        self.ledger.close()


def of(request: Request) -> Context:
    """Return the context of the app that serves this request."""
    context: Context = request.app.state.context
    return context


Deps = Annotated[Context, Depends(of)]
