"""The messages between servers and clients: typed headers, followed by the tensors as raw bytes.

A client opens one stream to a server and says `Hello`; the server answers `Welcome` or `Denied`. Once the client has
loaded its data for this run it says `Ready`. Then the server sends `Work`, and the client replies to each with one
`Answer` or `Refusal` of the same number, until the server says `Done` or either side says `Bye`. Session and number
match each answer to its request; late answers and duplicates are dropped.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from cutlayer.remote.protocol.commands import AnyCommand

PROTOCOL = 4
SERVICE = "cutlayer.Link"
JOIN = f"/{SERVICE}/Join"
MEET = f"/{SERVICE}/Meet"
STOPPING = "the server is stopping for now"  # of a Bye
MOST_LISTS = 1000  # lists of commands that a client remembers
MOST_BYTES = 2**40  # of one message from a server; memory is allocated only for what has arrived

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Reason = Annotated[str, Meta(max_length=2000)]


class TensorForm(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The type and shape of a tensor."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]


TensorForms = Annotated[tuple[TensorForm, ...], Meta(max_length=20_000)]
Numbers = Annotated[tuple[int | float, ...], Meta(max_length=5_000_000)]


class Message(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """A message; its `tensors`, if it has any, describe the bytes that follow the header."""


class KeptVersion(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A value that a client keeps: its name, its version, and the token of the round that told it to."""

    name: Name
    version: int
    token: Count


class Hello(Message, frozen=True, tag="hello"):
    """A client introduces itself."""

    protocol: int
    version: Annotated[str, Meta(max_length=64)]  # of cutlayer
    name: Name  # must be the name in the certificate, if there is one
    plugins: Annotated[dict[Name, Annotated[str, Meta(max_length=64)]], Meta(max_length=100)]  # file name -> hash


class Welcome(Message, frozen=True, tag="welcome"):
    """A server accepts a client."""

    session: Count
    client: Count  # its number
    run: Annotated[str, Meta(max_length=100_000)]  # the configuration, as TOML


class Ready(Message, frozen=True, tag="ready"):
    """A client is ready for the run: its data are loaded, and it states what it keeps."""

    session: Count
    samples: Annotated[int, Meta(ge=0, le=2**40)]
    sample: Annotated[tuple[TensorForm, ...], Meta(max_length=16)]  # inputs in the order of their names, then target
    kept: Annotated[tuple[KeptVersion, ...], Meta(max_length=1000)]
    tests: Annotated[int, Meta(ge=0, le=2**40)] = 0  # samples that it holds for testing


class Denied(Message, frozen=True, tag="denied"):
    """A server refuses a client; `final` means that it is no use to try again."""

    reason: Reason
    final: bool


class Work(Message, frozen=True, tag="work"):
    """Commands for a client: a list by number, with its content the first time it is used in a session."""

    session: Count
    number: Count  # of the message in this session
    round: Count
    key: Count  # of the round
    token: Count  # of this attempt at the round
    begins: bool  # a round begins: the slots hold nothing of it yet
    list: Count
    commands: Annotated[tuple[AnyCommand, ...], Meta(max_length=5_000_000)] | None
    numbers: Numbers
    tensors: TensorForms = ()
    tests: bool = False  # batches are of the samples that the client holds for testing


class Answer(Message, frozen=True, tag="answer"):
    """The values that a client sends up."""

    session: Count
    number: Count
    token: Count  # of the attempt at the round
    seconds: float  # that the work took
    numbers: Numbers
    tensors: TensorForms = ()


class Refusal(Message, frozen=True, tag="refusal"):
    """A client has not done its work: where it stopped, and why."""

    session: Count
    number: Count
    where: Reason
    reason: Reason


class Sent(Message, frozen=True, tag="sent"):
    """A value that a server sends to the other server, or the fed server directly to a client."""

    token: Count
    number: Count  # counts the values of this attempt at the round
    tree: Any  # a skeleton of core/skeleton.py, without texts and lists
    numbers: Numbers
    tensors: TensorForms = ()


class Done(Message, frozen=True, tag="done"):
    """The run is over."""

    reason: Reason


class Bye(Message, frozen=True, tag="bye"):
    """The sender leaves, and may reconnect later."""

    reason: Reason


# Between two servers in two processes.


class SavedRounds(Message, frozen=True, tag="saved_rounds"):
    """The rounds of which a server has a checkpoint, oldest first."""

    rounds: tuple[Count, ...]


class Begin(Message, frozen=True, tag="begin"):
    """A round begins with these clients."""

    round: Count
    token: Count
    samples: dict[int, int]  # how many each client has
    held: dict[int, dict[Name, tuple[int, Count]]]  # the versions that each client keeps, with their tokens


class Respondents(Message, frozen=True, tag="respondents"):
    """The clients that answered the `up` of this number."""

    token: Count
    number: Count
    ids: tuple[Count, ...]


class Gone(Message, frozen=True, tag="gone"):
    """The training server has lost a client, so the fed server need not wait for it."""

    token: Count
    client: Count


FromClient = Hello | Ready | Answer | Refusal | Bye
FromServer = Welcome | Denied | Work | Sent | Done | Bye
FromPeer = SavedRounds | Begin | Respondents | Gone | Sent | Done | Bye
