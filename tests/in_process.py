"""Clients behind the wire's own bytes, but in this process: what the tests of remote rounds share."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cutlayer.batches import Batching
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.methods.base import Method
from cutlayer.program import Program
from cutlayer.remote.deployment import Deployment
from cutlayer.remote.messages import Work
from cutlayer.remote.office import Answered, Line, Office
from cutlayer.remote.session import Device, Session
from cutlayer.remote.vault import Vault


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


def join(office: Office, device: Device) -> Line:
    """A session whose answers are there at once."""
    session = Session(device, office.new_session())

    def send(work: Work, tensors: Sequence[Tensor]) -> int:
        reply = session.work(work, [a.cpu() for a in tensors])  # as bytes have no device
        if reply is not None:
            office.take(Answered(device.client, session.number, reply.message, [a.cpu() for a in reply.tensors]))
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


def deployment(
    method: Method, data: Arrays, partition: Partition, *, batching: Batching, seed: int, **options: Any
) -> Deployment:
    """A deployment whose clients are all there."""
    office = Office()
    for client in range(len(partition)):
        join(office, device(method, data, partition, batching, client))
    return Deployment(
        method=method,
        office=office,
        sample=data.take([0, 1]),
        batching=batching,
        seed=seed,
        gather=lambda _: tuple(office.lines()),
        **options,
    )
