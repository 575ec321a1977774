"""What servers and clients say to each other: typed headers, beside which the tensors travel as raw bytes.

A client opens one stream to a server and says `Hello`; the server answers `Welcome` or `Denied`. Once the client has
loaded its data for this run it says `Ready`. From then on the server sends `Work`, to which the client gives one
`Answer` or `Refusal` of the same number, until the server says `Done` or either side says `Bye`. Session and number
make every message the one answer to one question: what is late, or comes twice, is dropped.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from cutlayer.remote.protocol.commands import AnyCommand, Skeleton

PROTOCOL = 1
SERVICE = "cutlayer.Link"
JOIN = f"/{SERVICE}/Join"
MEET = f"/{SERVICE}/Meet"
MOST_LISTS = 1000  # lists of commands that a client remembers
MOST_BYTES = 2**40  # of one message from a server; memory is taken only for what comes

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=100_000)]
Reason = Annotated[str, Meta(max_length=2000)]
Packing = Literal["raw", "bf16", "int8"]


class TensorForm(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Type and shape of a tensor, and how its bytes are packed."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    packing: Packing = "raw"


TensorForms = Annotated[tuple[TensorForm, ...], Meta(max_length=20_000)]
Numbers = Annotated[tuple[int | float, ...], Meta(max_length=5_000_000)]


class Message(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """One message; `tensors` describes the bytes behind the header."""


class KeptVersion(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A value that a client kept: its name, its version, and the token of the round in which it was told to."""

    name: Name
    version: int
    token: Count


class Hello(Message, frozen=True, tag="hello"):
    """A client introduces itself."""

    protocol: int
    version: Annotated[str, Meta(max_length=64)]  # of cutlayer
    name: Name  # who it says it is; the certificate says who it is
    plugins: Annotated[dict[Name, Annotated[str, Meta(max_length=64)]], Meta(max_length=100)]  # file name -> hash


class Welcome(Message, frozen=True, tag="welcome"):
    """A server lets a client in."""

    session: Count
    client: Count  # its number
    run: Text  # the configuration, as TOML
    packing: Packing  # of activations on their way up


class Ready(Message, frozen=True, tag="ready"):
    """A client has made itself ready for the run: its data are loaded, and it states what it keeps."""

    session: Count
    samples: Annotated[int, Meta(ge=0, le=2**40)]
    sample: Annotated[
        tuple[TensorForm, ...], Meta(max_length=16)
    ]  # of one input, by the order of its names; then its target
    kept: Annotated[tuple[KeptVersion, ...], Meta(max_length=1000)]


class Denied(Message, frozen=True, tag="denied"):
    """A server does not let a client in; `final` tells that trying again is no use."""

    reason: Reason
    final: bool


class Work(Message, frozen=True, tag="work"):
    """Commands for a client: a list by number, with its content the first time it is used in a session."""

    session: Count
    number: Count  # of the message in this session
    round: Count
    key: Count  # of the round
    token: Count  # of this attempt at the round
    begins: bool  # a round begins: whatever is in the slots is of an older one
    list: Count
    commands: Annotated[tuple[AnyCommand, ...], Meta(max_length=5_000_000)] | None
    numbers: Numbers
    tensors: TensorForms = ()


class Answer(Message, frozen=True, tag="answer"):
    """What goes up."""

    session: Count
    number: Count
    token: Count  # of the attempt at the round
    seconds: float  # that the client worked
    numbers: Numbers
    tensors: TensorForms = ()


class Refusal(Message, frozen=True, tag="refusal"):
    """A client did not do its work, and says where and why."""

    session: Count
    number: Count
    where: Reason
    reason: Reason


class FedValue(Message, frozen=True, tag="fed_value"):
    """A value that the fed server sends to a client itself, which the training server never sees."""

    session: Count
    token: Count
    number: Count  # of the value in this attempt at the round
    tree: Skeleton
    numbers: Numbers
    tensors: TensorForms = ()


class Done(Message, frozen=True, tag="done"):
    """The run is over."""

    reason: Reason


class Bye(Message, frozen=True, tag="bye"):
    """The sender leaves; the other may come back later."""

    reason: Reason


# Between the two servers, where each is a process of its own.


class SavedRounds(Message, frozen=True, tag="saved_rounds"):
    """The rounds of which a server has a checkpoint, oldest first."""

    rounds: tuple[Count, ...]


class Begin(Message, frozen=True, tag="begin"):
    """A round begins with these clients, who have so many samples and keep these versions."""

    round: Count
    token: Count
    samples: dict[int, int]
    held: dict[Name, dict[int, tuple[int, Count]]]


class Respondents(Message, frozen=True, tag="respondents"):
    """Who answered the `up` of this number."""

    token: Count
    number: Count
    ids: tuple[Count, ...]


class Gone(Message, frozen=True, tag="gone"):
    """A client is lost to the training server, so nothing will come from it."""

    token: Count
    client: Count


class Sent(Message, frozen=True, tag="sent"):
    """A value that one server hands to the other."""

    token: Count
    number: Count
    tree: Skeleton
    numbers: Numbers
    tensors: TensorForms = ()


FromClient = Hello | Ready | Answer | Refusal | Bye
FromServer = Welcome | Denied | Work | FedValue | Done | Bye
FromPeer = SavedRounds | Begin | Respondents | Gone | Sent | Done | Bye
