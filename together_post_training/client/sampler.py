"""Sampling from, and scoring with, one snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

from together_post_training.client.channel import Connection
from together_post_training.client.server_warnings import ServerWarnings
from together_post_training.v1 import generator_pb2


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Sampler:
    """Answers from the same weights for ever, or, of a live snapshot, from those that its session published last. Needs
    no order: any number of calls may run at once. The server keeps the snapshot as long as this object lives.

    warnings: what the server wants the caller to know of answers that came.
    """

    connection: Connection
    snapshot: str
    base_model: str
    warnings: ServerWarnings = field(default_factory=ServerWarnings, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.connection.holds.hold(self.connection, self, self.snapshot)

    def exported(self) -> None:
        """Somebody elsewhere may be about to sample from the same snapshot."""
        self.connection.holds.export(self.snapshot)

    async def sample(self, request: generator_pb2.SampleRequest) -> generator_pb2.SampleResponse:
        """Cancelling it frees its share of the server."""
        request.snapshot = self.snapshot
        response = await self.connection.call("generator.Sample", request)
        self.warnings.note(response.warnings)
        return response

    async def compute_logprobs(
        self, request: generator_pb2.ComputeLogprobsRequest
    ) -> generator_pb2.ComputeLogprobsResponse:
        request.snapshot = self.snapshot
        response = await self.connection.call("generator.ComputeLogprobs", request)
        self.warnings.note(response.warnings)
        return response


async def open_base_model(connection: Connection, base_model: str) -> Sampler:
    """A sampler of untrained weights, which the server may first have to load."""
    request = generator_pb2.OpenSnapshotRequest(base_model=base_model)
    return await _open(connection, request)


async def open_checkpoint(connection: Connection, path: str) -> Sampler:
    """A sampler of a saved checkpoint, tinker://..."""
    return await _open(connection, generator_pb2.OpenSnapshotRequest(path=path))


async def _open(connection: Connection, request: generator_pb2.OpenSnapshotRequest) -> Sampler:
    snapshot = await connection.call("generator.OpenSnapshot", request)
    return Sampler(connection, snapshot.name, snapshot.base_model)
