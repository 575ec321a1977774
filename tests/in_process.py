"""Clients behind the wire's own bytes, but in this process: what the tests of remote rounds share."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cutlayer.batches import Batching
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.methods.base import Method
from cutlayer.program import Program
from cutlayer.remote.client import packings
from cutlayer.remote.deployment import Deployment
from cutlayer.remote.messages import FromClient, Packing, Work
from cutlayer.remote.office import Answered, Line, Office
from cutlayer.remote.session import Device, Reply, Session
from cutlayer.remote.vault import Vault
from cutlayer.remote.wire import Decoder, encode


def device(method: Method, data: Arrays, partition: Partition, batching: Batching, client: int, **more: Any) -> Device:
    """A client that holds its own samples only."""
    return Device(
        client=client,
        program=Program(method),
        data=data.take(partition.clients[client]),
        batching=batching,
        vault=Vault(client),
        **more,
    )


def join(office: Office, device: Device, packing: Packing = "raw") -> Line:
    """A session whose answers are there at once, as bytes of the wire bring them."""
    session = Session(device, office.new_session())

    def send(work: Work, tensors: Sequence[Tensor]) -> int:
        reply = session.work(work, [a.cpu() for a in tensors])  # as bytes have no device
        if reply is not None:
            come = carried(reply, packing)
            office.take(Answered(device.client, session.number, *come))
        return 0

    line = Line(
        client=device.client,
        name=f"client-{device.client}",
        session=session.number,
        samples=len(device.data),
        kept=device.vault.statement(),
        send=send,
        close=lambda reason: None,
    )
    office.join(line)
    return line


def carried(reply: Reply, packing: Packing = "raw") -> tuple[Any, list[Tensor]]:
    """A reply, encoded and decoded."""
    decoder = Decoder(FromClient, 2**30)
    *_, come = (decoder.feed(chunk) for chunk in encode(reply.message, reply.tensors, packings(reply, packing)))
    assert come is not None
    return come


def deployment(
    method: Method,
    data: Arrays,
    partition: Partition,
    *,
    batching: Batching,
    seed: int,
    packing: Packing = "raw",
    **options: Any,
) -> Deployment:
    """A deployment whose clients are all there."""
    office = Office()
    for client in range(len(partition)):
        join(office, device(method, data, partition, batching, client), packing)
    return Deployment(
        method=method,
        office=office,
        sample=data.take([0, 1]),
        batching=batching,
        seed=seed,
        gather=lambda _: tuple(office.lines()),
        **options,
    )
