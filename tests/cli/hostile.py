"""A server that sends whatever a test wants: other bytes, other names, half of what it announced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from together_post_training.v1 import catalog_pb2, catalog_pb2_grpc, checkpoints_pb2_grpc
from together_post_training.v1 import checkpoints_pb2 as pb

PIECE = 1000
PATH = "tinker://run/weights/a"


@dataclass
class Hostile(
    checkpoints_pb2_grpc.CheckpointServiceServicer, catalog_pb2_grpc.CatalogServiceServicer
):
    """listed: what GetCheckpoint says of files. sent: what is sent for each.

    change: makes of a piece what is sent instead. break_after: so many pieces of a call, then the connection breaks.
    """

    listed: dict[str, bytes]
    sent: dict[str, bytes] = field(default_factory=dict)
    change: Callable[[pb.DownloadCheckpointResponse], None] = lambda piece: None
    break_after: list[int] = field(default_factory=list)
    requests: list[pb.DownloadCheckpointRequest] = field(default_factory=list)
    address: str = ""

    def GetServerInfo(self, request, context):
        return catalog_pb2.ServerInfo(version="hostile")

    def GetCheckpoint(self, request, context):
        files = [
            pb.CheckpointFile(name=n, size_bytes=len(d), sha256=hashlib.sha256(d).hexdigest())
            for n, d in self.listed.items()
        ]
        return pb.Checkpoint(path=PATH, session="run", files=files)

    def DownloadCheckpoint(self, request, context):
        self.requests.append(request)
        data = self.sent.get(request.filename, self.listed.get(request.filename, b""))
        num_left = self.break_after.pop(0) if self.break_after else -1
        for offset in range(request.offset, len(data), PIECE):
            if num_left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            num_left -= 1
            piece = pb.DownloadCheckpointResponse(
                filename=request.filename,
                offset=offset,
                data=data[offset : offset + PIECE],
                size_bytes=len(data),
            )
            self.change(piece)
            yield piece


@contextmanager
def serving_hostile(files: dict[str, bytes]) -> Iterator[Hostile]:
    hostile = Hostile(listed=files)
    server = grpc.server(ThreadPoolExecutor(4))
    checkpoints_pb2_grpc.add_CheckpointServiceServicer_to_server(hostile, server)
    catalog_pb2_grpc.add_CatalogServiceServicer_to_server(hostile, server)
    hostile.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield hostile
    finally:
        server.stop(None)
