"""The fed server's way to the training server, where each is a process of its own."""

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cutlayer.remote.device.stream import channel_to
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.protocol.messages import MEET
from cutlayer.remote.server.peer import Peer
from cutlayer.remote.server.streams import follow_peer

log = logging.getLogger("cutlayer")

PAUSE, PATIENCE = 1.0, 10.0  # seconds between attempts, and for one
GOODBYE_SECONDS = 5.0


@contextmanager
def linked(peer: Peer, address: str, credentials: Credentials | None) -> Iterator[None]:
    """A link to the training server for as long as this lasts; it is made again whenever it breaks."""
    over = threading.Event()
    thread = threading.Thread(
        target=_keep_linked, args=(peer, address, credentials, over), name="peer link", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        peer.leave()
        thread.join(GOODBYE_SECONDS)  # what was said last is on its way


def _keep_linked(peer: Peer, address: str, credentials: Credentials | None, over: threading.Event) -> None:
    while not over.is_set():
        channel = channel_to(address, "train", credentials)
        if not _ready(channel):
            log.info("no training server at %s yet; trying again", address)
            channel.close()
            continue
        out: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        requests = (chunk for chunks in iter(out.get, None) for chunk in chunks)
        follow_peer(peer, channel.stream_stream(MEET)(requests), out)
        channel.close()
        over.wait(PAUSE)


def _ready(channel: Any) -> bool:
    import grpc

    try:
        grpc.channel_ready_future(channel).result(PATIENCE)
    except grpc.FutureTimeoutError:
        return False
    return True
