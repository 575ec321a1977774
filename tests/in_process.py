"""Clients in this process whose messages are encoded and decoded as on the wire; shared by tests of remote rounds."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from cutlayer.core.batches import Batching
from cutlayer.core.codec import Coder
from cutlayer.core.engine import Engine
from cutlayer.core.kinds import Kind
from cutlayer.core.method import Method
from cutlayer.core.program import Program
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.loop import Loop
from cutlayer.remote.device.session import ClientDevice, Reply, Session
from cutlayer.remote.device.store import ClientStore
from cutlayer.remote.device.terms import Attempts, Terms
from cutlayer.remote.joining.compiling import Learned, Taking
from cutlayer.remote.protocol.messages import FromClient, Work
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.sessions import Answered, ClientSession, Sessions
from cutlayer.remote.tensors.wire import Decoder, encode
from cutlayer.runs.codecs import Codecs, coders
from cutlayer.runs.rounds import Rounds


def device(
    method: Method,
    data: Arrays,
    partition: Partition,
    batching: Batching,
    client: int,
    coders: Mapping[Kind, Coder] = MappingProxyType({}),
    **more: Any,
) -> ClientDevice:
    """A client that holds its own samples only. It trusts its server if it is given no terms."""
    return ClientDevice(
        client=client,
        program=Program(method, coders),
        data=data.take(partition.clients[client]),
        batching=batching,
        store=ClientStore(client),
        **more,
    )


def terms(
    method: Method,
    data: Arrays,
    partition: Partition,
    batching: Batching,
    client: int,
    seed: int,
    coders: Mapping[Kind, Coder] = MappingProxyType({}),
    rounds: int = 100,
    **more: Any,
) -> Terms:
    """The terms of a device that follows its own copy of the run."""
    taking = Taking(
        method=method,
        coders=coders,
        like=data.take([0, 1]),
        batching=batching,
        client=client,
        samples=len(partition.clients[client]),
        clients=len(partition),
        rounds=rounds,
        seed=seed,
        **more,
    )
    return Terms(seed=seed, conversation=Learned(taking), attempts=Attempts(rounds, 3))


def join(sessions: Sessions, device: ClientDevice) -> ClientSession:
    """Open a session that answers at once; answers are encoded and decoded as on the wire."""
    session = Session(device, sessions.new_session())

    def send(work: Work, tensors: Sequence[Tensor]) -> int:
        reply = session.work(work, [a.cpu() for a in tensors])  # as bytes have no device
        if reply is not None:
            come = carried(reply)
            sessions.take(Answered(device.client, session.number, *come))
        return 0

    joined = ClientSession(
        client=device.client,
        name=f"client-{device.client}",
        number=session.number,
        samples=len(device.data),
        tests=0 if device.tests is None else len(device.tests),
        kept=device.store.statement(),
        transmit=send,
        close=lambda reason: None,
    )
    sessions.join(joined)
    return joined


def carried(reply: Reply) -> tuple[Any, list[Tensor]]:
    """A reply, encoded and decoded."""
    decoder = Decoder(FromClient, 2**30)
    *_, come = (decoder.feed(chunk) for chunk in encode(reply.message, reply.tensors))
    assert come is not None
    return come


def deployment(
    method: Method,
    data: Arrays,
    partition: Partition,
    *,
    batching: Batching,
    seed: int,
    codecs: Codecs = MappingProxyType({}),
    engine: Engine | None = None,
    deadline: float = 60.0,
    server_device: str = "cpu",
    followed: Sequence[int] = (),
    **options: Any,
) -> Rounds:
    """A deployment whose clients have all joined; some follow what their server asks, the others trust it."""
    sessions, made = Sessions(), coders(codecs, method.model, data.take([0, 1]).x)
    for client in range(len(partition)):
        own = terms(method, data, partition, batching, client, seed, made) if client in followed else None
        join(sessions, device(method, data, partition, batching, client, coders=made, terms=own))
    devices = DeviceBackend(
        method=method,
        coders=made,
        sessions=sessions,
        sample=data.take([0, 1]),
        gather=lambda _: tuple(sessions.present()),
        engine=engine or Loop(),
        deadline=deadline,
        device=server_device,
    )
    return Rounds(method, devices, batching=batching, seed=seed, **options)
