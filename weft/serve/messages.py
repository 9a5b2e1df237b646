"""Messages between the server and its ranks, the events of the engine, and the codec of messages.

    channel.send(*encode(StopBatch(batch=id))); message = decode(*channel.receive())

A message is a frozen dataclass. Its JSON header holds the name of its class under "type", and its fields; the
values of fields of type `bytes` or `tuple[bytes, ...]` travel in the payload, their sizes in the header.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from weft.core import tables
from weft.core.errors import CommError, InputError
from weft.serve.jobs import GenerationParams, Job, JsonObject
from weft.serve.model_facts import ModelFacts

PROTOCOL_VERSION = 2
"""Increase it with every change of a message: servers refuse ranks of another version."""


class ProtocolError(CommError):
    """A message that this version of weft cannot read."""


# From ranks to the server.
@dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a rank. `store_port`: of the store that rank 0 of several machines serves."""

    rank: int
    world: int
    pid: int
    host: str
    store_port: int = 0
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True)
class RankFailed:
    """A rank, or an agent (`rank` is None), ends with an error that belongs to no batch."""

    rank: int | None
    message: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The rank has loaded and warmed up the model."""

    facts: ModelFacts


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Sign of life: bytes in use, bytes available, and the seconds spent on batches since the last beat."""

    memory: int = 0
    limit: int = 0
    busy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BatchMessage:
    """Base of what the leader of a batch, its lowest rank, sends about it."""

    batch: str


@dataclass(frozen=True, kw_only=True)
class StepDone(BatchMessage):
    """`steps` steps, up to number `step`, took `seconds` each. Tuples have an entry for each rank."""

    step: int
    seconds: float
    steps: int = 1
    imbalance: float | None = None  # of attention seconds: largest over mean
    exposed: float = 0.0  # share of the time that ranks waited for messages
    attend: tuple[float, ...] = ()  # seconds in attention
    sent: tuple[int, ...] = ()  # bytes sent by attention
    plan: str | None = None
    density: float | None = None  # share of the attention that the last mask computes
    gain: float | None = None  # attention time of first plans over that of current plans
    runs: int = 0  # attention calls
    first: int = 0  # those of them that built their plan
    state: bytes = b""  # to continue from here; empty: not saved this time


@dataclass(frozen=True, kw_only=True)
class PreviewMade(BatchMessage):
    job: str
    step: int
    png: bytes


@dataclass(frozen=True)
class AttentionSpan:
    """What a rank did in an attention call, from `start` to `end` seconds after its beginning."""

    rank: int
    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class AttentionTimeline(BatchMessage):
    """The last attention call of a segment, on all ranks."""

    label: str
    spans: tuple[AttentionSpan, ...]


@dataclass(frozen=True, kw_only=True)
class BatchStopped(BatchMessage):
    """The batch stopped as requested, after the step whose state was sent last."""


@dataclass(frozen=True, kw_only=True)
class BatchDecoded(BatchMessage):
    """All frames are decoded: the ranks are free, while the leader still writes files."""


@dataclass(frozen=True, kw_only=True)
class ResultMade(BatchMessage):
    """The file of one job, and how long each stage took."""

    job: str
    name: str
    timings: dict[str, float]
    data: bytes


@dataclass(frozen=True, kw_only=True)
class BatchDone(BatchMessage):
    """All results were sent."""


@dataclass(frozen=True, kw_only=True)
class BatchFailed(BatchMessage):
    code: str
    message: str


# From the server to ranks.
@dataclass(frozen=True, kw_only=True)
class Join:
    """All ranks are connected: initialize the process group. `store`: the file of its store."""

    generation: int
    store: str = ""


@dataclass(frozen=True, kw_only=True)
class RunBatch:
    """Run `jobs` on `ranks`, from the beginning or from `state`, which was saved after `step`."""

    batch: str
    ids: tuple[str, ...]
    jobs: tuple[GenerationParams, ...]
    ranks: tuple[int, ...] = ()
    step: int = 0
    previews: bool = False
    images: tuple[bytes, ...] = ()  # of each job the image that it begins with; empty: none
    state: bytes = b""


@dataclass(frozen=True, kw_only=True)
class StopBatch:
    """Stop after the current step."""

    batch: str


@dataclass(frozen=True, kw_only=True)
class ContinueBatch:
    """Withdraw `StopBatch`."""

    batch: str


@dataclass(frozen=True)
class Shutdown:
    """End after the current batch."""


FromRank = Hello | RankFailed | Ready | Beat | BatchMessage
ToRank = Join | RunBatch | StopBatch | ContinueBatch | Shutdown
MESSAGES: dict[str, type[FromRank | ToRank]] = {
    each.__name__: each
    for each in {*get_args(FromRank), *BatchMessage.__subclasses__(), *get_args(ToRank)} - {BatchMessage}
}


# Inside the server: from its ranks to the engine, and from the engine to watchers and metrics.
@dataclass(frozen=True)
class RanksLost:
    reason: str
    blamed: bool = True
    """Whether it counts as a loss of the jobs that ran: not if the server has replaced the ranks itself."""


@dataclass(frozen=True)
class JobStarted:
    job: Job


@dataclass(frozen=True)
class JobEnded:
    """`job` is None if it was cancelled or deleted before."""

    id: str
    job: Job | None


@dataclass(frozen=True)
class BatchProgress:
    """A batch of these jobs made steps on these ranks."""

    step: StepDone
    jobs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


EngineEvent = JobStarted | JobEnded | BatchProgress | PreviewMade | AttentionTimeline | RanksLost


def encode(message: FromRank | ToRank) -> tuple[JsonObject, bytes]:
    """Return the JSON header and the payload of a message."""
    header: JsonObject = {"type": type(message).__name__, **asdict(message)}
    payload: list[bytes] = []
    for name, is_tuple in _payload_fields(type(message)).items():
        pieces: tuple[bytes, ...] = header[name] if is_tuple else (header[name],)
        header[name] = [len(piece) for piece in pieces]
        payload += pieces
    return header, b"".join(payload)


def decode(header: JsonObject, payload: bytes = b"") -> FromRank | ToRank:
    """Return the message; raise `ProtocolError` if its type, a field or the version is not of this weft."""
    name = header.get("type")
    version = header.get("version", 0) if name in (None, Hello.__name__) else PROTOCOL_VERSION
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"A rank has version {tables.shown(version)} of the protocol, this server has "
            f"{PROTOCOL_VERSION}. Install the same version of weft on every machine."
        )
    if not isinstance(name, str) or name not in MESSAGES:
        raise ProtocolError(f"Unknown type of message {tables.shown(name)}.")
    kind, fields = MESSAGES[name], dict(header)
    del fields["type"]
    try:
        for each, is_tuple in _payload_fields(kind).items():
            if each in fields:
                pieces, payload = _cut(payload, fields[each], f"{name}: {each}")
                fields[each] = pieces if is_tuple else b"".join(pieces)
        return tables.read(kind, fields, name)
    except InputError as error:
        raise ProtocolError(f"A message cannot be read. {error}") from error


def _cut(payload: bytes, sizes: Any, field: str) -> tuple[tuple[bytes, ...], bytes]:
    """Return pieces of these sizes, and the rest."""
    if not tables.check_of(tuple[int, ...])(sizes) or min(sizes, default=0) < 0 or sum(sizes) > len(payload):
        raise InputError(f"{field} must be sizes within {len(payload)} bytes, got {tables.shown(sizes)}.")
    pieces: list[bytes] = []
    for size in sizes:
        pieces.append(payload[:size])
        payload = payload[size:]
    return tuple(pieces), payload


@cache
def _payload_fields(kind: type[FromRank | ToRank]) -> dict[str, bool]:
    """Return the fields whose values travel in the payload, and whether each is a tuple."""
    types = {bytes: False, tuple[bytes, ...]: True}
    return {name: types[hint] for name, hint in get_type_hints(kind).items() if hint in types}
