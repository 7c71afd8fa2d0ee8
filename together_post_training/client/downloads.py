"""Links to checkpoints for programs that speak HTTP: urllib, requests, curl, a browser.

    link = downloads().offer_archive(connection, "tinker://run/sampler_weights/a")
    urllib.request.urlretrieve(link.url, "a.tar")

A small web server on 127.0.0.1, in a thread of this process, answers them with what the service sends over gRPC. It is
there from the first link until the process ends, for programs on the same machine. Who knows a link may read what is
behind it for a day, whatever becomes of the client that made it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

from together_post_training.client import tar
from together_post_training.client.channel import Connection
from together_post_training.client.checkpoint_files import (
    find_checkpoint,
    part_of_file,
    whole_file,
)
from together_post_training.errors import ConnectionLostError, PostTrainingError
from together_post_training.names import parse_checkpoint_path
from together_post_training.v1 import checkpoints_pb2 as pb

logger = logging.getLogger(__name__)

LIFETIME_S = 24 * 3600.0
# Last in every archive: what comes before it is whole.
COMPLETE = "checkpoint_complete"
# A peer that keeps a connection open and says nothing for so long is left.
_IDLE_S = 60.0
_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """expire_time_s: since 1970."""

    url: str
    expire_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is behind a link. filename: None: an archive of all files."""

    connection: Connection
    path: str
    filename: str | None
    expire_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """An answer. `pieces` has exactly `size_bytes` bytes, or raises."""

    size_bytes: int
    pieces: Iterable[bytes]
    headers: dict[str, str] = field(default_factory=dict)
    status: HTTPStatus = HTTPStatus.OK


class Downloads:
    """May be used from any thread. `clock`: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}
        self._connections: dict[tuple, Connection] = {}
        self._server: _WebServer | None = None

    def offer_archive(self, connection: Connection, path: str) -> Link:
        """A tar of all files of a checkpoint, and an empty file `checkpoint_complete`."""
        parsed = parse_checkpoint_path(path)
        return self._offer(connection, path, None, f"{parsed.name}.tar")

    def offer_file(self, connection: Connection, path: str, filename: str) -> Link:
        return self._offer(connection, path, filename, filename)

    def find(self, location: str) -> Offer | None:
        """What is behind the path of a URL, expired or not; None: nothing."""
        return self._offers.get(unquote(location))

    def has_expired(self, offer: Offer) -> bool:
        return self._clock() >= offer.expire_time_s

    def _offer(self, connection: Connection, path: str, filename: str | None, name: str) -> Link:
        with self._lock:
            for location in [at for at, offer in self._offers.items() if self.has_expired(offer)]:
                del self._offers[location]
            location = f"/{secrets.token_urlsafe(32)}/{name}"
            offer = Offer(
                connection=self._own(connection),
                path=path,
                filename=filename,
                expire_time_s=self._clock() + LIFETIME_S,
            )
            self._offers[location] = offer
            self._server = self._server or _WebServer(self)
            url = f"http://127.0.0.1:{self._server.server_port}{quote(location)}"
            return Link(url=url, expire_time_s=offer.expire_time_s)

    def _own(self, connection: Connection) -> Connection:
        """Like it, but not closed with the client that it belongs to."""
        key = (connection.server, connection.key, tuple(sorted(connection.headers.items())))
        if key not in self._connections:
            self._connections[key] = Connection(
                connection.server,
                key=connection.key,
                headers=connection.headers,
                policy=connection.policy,
            )
        return self._connections[key]


def downloads() -> Downloads:
    """This process's."""
    return _downloads_of(os.getpid())


@functools.cache
def _downloads_of(_pid: int) -> Downloads:
    return Downloads()


class _WebServer(ThreadingHTTPServer):
    """Serves from when it is made until the process ends."""

    daemon_threads = True

    def __init__(self, downloads: Downloads) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.downloads = downloads
        name = "together-post-training-downloads"
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """The base class prints a traceback, also where a peer has only hung up."""
        error = sys.exception()
        level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR
        logger.log(level, "a download failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: _WebServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Without the URL, which is a secret."""
        logger.debug("a download: %s", self.command)

    def _answer(self, *, with_body: bool) -> None:
        offer = self.server.downloads.find(self.path)
        if offer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such link here. Ask for a new one.")
            return
        if self.server.downloads.has_expired(offer):
            self._refuse(HTTPStatus.GONE, "The link has expired. Ask for a new one.")
            return
        try:
            checkpoint = find_checkpoint(offer.connection, offer.path)
            body = _body(offer, checkpoint, self._range())
        except PostTrainingError as error:
            self._refuse(HTTPStatus(error.http_status), error.message)
        except ConnectionLostError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            self._send(body, with_body=with_body)

    def _range(self) -> str:
        """With If-Range it would depend on a version that these answers do not name."""
        return "" if self.headers.get("If-Range") else self.headers.get("Range", "")

    def _send(self, body: Body, *, with_body: bool) -> None:
        self.send_response(body.status)
        for name, value in body.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(body.size_bytes))
        self.end_headers()
        if not with_body:
            return
        # The peer sees that it got less than Content-Length.
        closes, self.close_connection = self.close_connection, True
        try:
            for piece in body.pieces:
                self.wfile.write(piece)
        except (PostTrainingError, ConnectionLostError) as error:
            logger.warning("a download broke off: %s", error)
        except OSError as error:
            logger.debug("a download was left: %r", error)
        else:
            self.close_connection = closes

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        text = f"{message}\n".encode()
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        body = Body(size_bytes=len(text), pieces=[text], headers=headers, status=status)
        self._send(body, with_body=self.command != "HEAD")


def _body(offer: Offer, checkpoint: pb.Checkpoint, asked_range: str) -> Body:
    if offer.filename is None:
        return _archive(offer, checkpoint)
    for file in checkpoint.files:
        if file.name == offer.filename:
            return _file(offer, file, asked_range)
    text = f"{offer.path} has no file {offer.filename} any more.\n".encode()
    return Body(size_bytes=len(text), pieces=[text], status=HTTPStatus.NOT_FOUND)


def _archive(offer: Offer, checkpoint: pb.Checkpoint) -> Body:
    entries = _entries(checkpoint)

    def contents() -> Iterator[tuple[tar.Entry, Iterable[bytes]]]:
        for entry, file in zip(entries, checkpoint.files, strict=False):
            yield entry, whole_file(offer.connection, offer.path, file)
        yield entries[-1], ()

    return Body(
        size_bytes=tar.size_bytes(entries),
        pieces=tar.pieces(contents()),
        headers={"Content-Type": "application/x-tar", "Accept-Ranges": "none"},
    )


def _entries(checkpoint: pb.Checkpoint) -> Sequence[tar.Entry]:
    time_s = checkpoint.create_time.seconds
    sizes = [(file.name, file.size_bytes) for file in checkpoint.files]
    return [
        tar.Entry(name=name, size_bytes=size_bytes, time_s=time_s)
        for name, size_bytes in [*sizes, (COMPLETE, 0)]
    ]


def _file(offer: Offer, file: pb.CheckpointFile, asked_range: str) -> Body:
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    size = file.size_bytes
    wanted = parse_range(asked_range, size)
    if wanted is None:
        pieces = whole_file(offer.connection, offer.path, file)
        return Body(size_bytes=size, pieces=pieces, headers=headers)
    start, stop = wanted
    if start >= stop:
        headers["Content-Range"] = f"bytes */{size}"
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        return Body(size_bytes=0, pieces=(), headers=headers, status=status)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Body(
        size_bytes=stop - start,
        pieces=part_of_file(offer.connection, offer.path, file, start, stop),
        headers=headers,
        status=HTTPStatus.PARTIAL_CONTENT,
    )


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """(start, stop) of what a Range header asks of so many bytes; start >= stop: of nothing that is there. None: it
    asks for everything, or for what may be answered so (several ranges, other units; RFC 9110, section 14.2)."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size
