"""Links to checkpoints: what programs get that speak nothing but HTTP, also when the service behind it fails."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import socket
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from together_post_training.client import downloads as module
from together_post_training.client import tar
from together_post_training.client.address import parse_address
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.downloads import Downloads, Link, parse_range
from together_post_training.client.loop import background_loop
from together_post_training.client.retry import RetryPolicy
from together_post_training.v1 import catalog_pb2_grpc, checkpoints_pb2, checkpoints_pb2_grpc

PATH = "tinker://run:train:0/sampler_weights/a"
PIECE_BYTES = 1000
FILES = {
    "adapter_model.safetensors": bytes(range(256)) * 20,
    "adapter_config.json": b'{"r": 4}',
    "empty.json": b"",
}
TIME_S = 1_700_000_000
FAST = RetryPolicy(
    connect_timeout_s=5.0, outage_timeout_s=0.5, first_delay_s=0.01, max_delay_s=0.05
)


class FakeCheckpoints(checkpoints_pb2_grpc.CheckpointServiceServicer):
    """One checkpoint. `breaks`: before how many pieces of a call the connection breaks, call by call."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        # What the list of files says, where it differs.
        self.listed: dict[str, bytes] = {}
        self.breaks: list[int] = []
        # What the files are after a break.
        self.replaced: dict[str, bytes] = {}
        self.num_pieces = 0
        self.metadata: list[dict[str, Any]] = []

    async def GetCheckpoint(self, request: Any, context: Any) -> checkpoints_pb2.Checkpoint:
        self.metadata.append(dict(context.invocation_metadata()))
        shown = checkpoints_pb2.Checkpoint(path=request.path)
        shown.create_time.FromSeconds(TIME_S)
        for name, data in {**self.files, **self.listed}.items():
            digest = hashlib.sha256(data).hexdigest()
            shown.files.add(name=name, size_bytes=len(data), sha256=digest)
        return shown

    async def DownloadCheckpoint(self, request: Any, context: Any) -> Any:
        data = self.files[request.filename]
        pieces = range(request.offset, max(len(data), 1), PIECE_BYTES)
        left = self.breaks.pop(0) if self.breaks else len(pieces)
        for start in pieces:
            if not left:
                self.files.update(self.replaced)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            left -= 1
            self.num_pieces += 1
            yield checkpoints_pb2.DownloadCheckpointResponse(
                filename=request.filename,
                offset=start,
                data=data[start : start + PIECE_BYTES],
                size_bytes=len(data),
            )


@pytest.fixture
def fake() -> FakeCheckpoints:
    return FakeCheckpoints()


@pytest.fixture
def connection(fake: FakeCheckpoints) -> Iterator[Connection]:
    async def start() -> tuple[Any, int]:
        server = grpc.aio.server()
        checkpoints_pb2_grpc.add_CheckpointServiceServicer_to_server(fake, server)
        catalog_pb2_grpc.add_CatalogServiceServicer_to_server(
            catalog_pb2_grpc.CatalogServiceServicer(), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = on_loop(start())
    address = parse_address(f"127.0.0.1:{port}", what="address")
    yield Connection(FixedServer(address), policy=FAST)
    on_loop(server.stop(None))


def on_loop(work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, background_loop().loop).result(20)


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def offers(now: list[float]) -> Downloads:
    return Downloads(clock=lambda: now[0])


@pytest.fixture
def archive(offers: Downloads, connection: Connection) -> Link:
    return offers.offer_archive(connection, PATH)


@pytest.fixture
def weights(offers: Downloads, connection: Connection) -> Link:
    return offers.offer_file(connection, PATH, "adapter_model.safetensors")


def read(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def status_of(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        read(url)
    return refused.value.code


def test_an_archive_is_a_plain_tar_that_says_last_that_it_is_complete(archive, tmp_path):
    path, headers = urllib.request.urlretrieve(archive.url, tmp_path / "a.tar")
    assert int(headers["Content-Length"]) == (tmp_path / "a.tar").stat().st_size
    assert headers["Content-Type"] == "application/x-tar"
    with tarfile.open(path, "r:") as packed:
        members = packed.getmembers()
        contents = {m.name: packed.extractfile(m).read() for m in members}  # pyright: ignore[reportOptionalMemberAccess]
    assert contents == {**FILES, "checkpoint_complete": b""}
    assert members[-1].name == "checkpoint_complete"
    assert all(m.isreg() and m.mode == 0o644 and m.mtime == TIME_S for m in members)


def test_a_file_comes_as_it_is_under_its_own_name(weights):
    assert read(weights.url) == FILES["adapter_model.safetensors"]
    assert weights.url.endswith("/adapter_model.safetensors")
    assert httpx.get(weights.url).content == FILES["adapter_model.safetensors"]


def test_an_empty_file_is_no_failure(offers, connection):
    assert read(offers.offer_file(connection, PATH, "empty.json").url) == b""


def test_head_tells_the_length_and_sends_nothing(archive, weights, fake):
    for link in (archive, weights):
        answer = httpx.head(link.url)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["Content-Length"]) == len(read(link.url))
    fake.num_pieces = 0
    httpx.head(archive.url)
    assert fake.num_pieces == 0


def test_one_connection_carries_any_number_of_answers(archive, weights):
    with httpx.Client() as client:
        for _ in range(3):
            assert client.get(weights.url).content == FILES["adapter_model.safetensors"]
            assert client.head(archive.url).status_code == 200
            assert client.get(archive.url + "x").status_code == 404


@pytest.mark.parametrize("first_lines", ["GET {} HTTP/1.0", "GET {} HTTP/1.1\r\nConnection: close"])
def test_a_connection_ends_with_the_answer_where_the_peer_asked_for_that(weights, first_lines):
    url = httpx.URL(weights.url)
    with socket.create_connection((url.host, url.port), timeout=10) as peer:
        peer.sendall(first_lines.format(url.path).encode() + b"\r\n\r\n")
        answer = b"".join(iter(lambda: peer.recv(65536), b""))
    assert answer.endswith(FILES["adapter_model.safetensors"])


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=1500-2700", 1500, 2701),
        ("bytes=5000-", 5000, 5120),
        ("bytes=-7", 5113, 5120),
        ("bytes=5119-9999", 5119, 5120),
        ("bytes=-9999", 0, 5120),
    ],
)
def test_a_part_of_a_file_can_be_asked_for(weights, asked, start, stop):
    answer = httpx.get(weights.url, headers={"Range": asked})
    assert answer.status_code == 206
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/5120"
    assert answer.content == FILES["adapter_model.safetensors"][start:stop]


def test_a_part_that_is_not_there_is_not_satisfiable(weights):
    for asked in ("bytes=5120-", "bytes=-0"):
        answer = httpx.get(weights.url, headers={"Range": asked})
        assert (answer.status_code, answer.headers["Content-Range"]) == (416, "bytes */5120")


@pytest.mark.parametrize(
    "asked",
    ["bytes=0-1,3-4", "bytes=5-3", "items=0-1", "bytes=-", "nonsense", "bytes=0-" + 5000 * "9"],
)
def test_other_ranges_are_answered_with_the_whole_file(weights, asked):
    answer = httpx.get(weights.url, headers={"Range": asked})
    assert (answer.status_code, len(answer.content)) == (200, 5120)


@given(size=st.integers(0, 30), start=st.integers(0, 40), stop=st.integers(0, 40))
def test_ranges_never_reach_beyond_the_file(size, start, stop):
    found = parse_range(f"bytes={start}-{stop}", size)
    assert (found is None) == (stop < start)
    if found is not None and found[0] < found[1]:
        assert (found[0], found[1]) == (start, min(size, stop + 1))


@given(st.dictionaries(st.text("ab/é", min_size=1, max_size=150), st.binary(max_size=1100)))
def test_the_size_of_an_archive_is_known_before_it_is_made(files):
    entries = [tar.Entry(name=n, size_bytes=len(d), time_s=0) for n, d in files.items()]
    data = b"".join(tar.pieces((e, [d]) for e, d in zip(entries, files.values(), strict=True)))
    assert tar.size_bytes(entries) == len(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as packed:
        assert [m.size for m in packed.getmembers()] == [len(d) for d in files.values()]


def test_a_link_ends_after_a_day(archive, now):
    assert archive.expire_time_s == 1000.0 + 24 * 3600
    now[0] = archive.expire_time_s - 1
    assert read(archive.url)
    now[0] = archive.expire_time_s
    assert status_of(archive.url) == 410


def test_links_cannot_be_guessed(offers, connection, archive, weights):
    token, other = archive.url.split("/")[3], weights.url.split("/")[3]
    assert len(token) >= 43
    assert token != other
    assert archive.url.startswith("http://127.0.0.1:")
    assert status_of(archive.url.replace(token, "x" * 43)) == 404
    assert status_of(archive.url.replace("a.tar", "b.tar")) == 404


def test_links_that_have_ended_are_forgotten(offers, connection, archive, now):
    now[0] += module.LIFETIME_S
    offers.offer_archive(connection, PATH)
    assert status_of(archive.url) == 404


def test_a_file_that_is_gone_is_not_found(weights, fake):
    del fake.files["adapter_model.safetensors"]
    assert status_of(weights.url) == 404


def test_a_broken_connection_is_taken_up_where_it_broke(archive, weights, fake):
    fake.breaks = [2, 0, 3]
    assert read(weights.url) == FILES["adapter_model.safetensors"]
    assert fake.num_pieces == 6
    fake.breaks = [1]
    with tarfile.open(fileobj=io.BytesIO(read(archive.url))) as packed:
        assert len(packed.getmembers()) == 4


def test_a_service_that_stays_away_cuts_the_download_short(weights, fake):
    fake.breaks = [2, 0, 0, 0]
    with pytest.raises(http.client.IncompleteRead):
        read(weights.url)


def test_a_download_that_is_cut_short_ends_its_connection(weights, fake):
    fake.breaks = [2, 0, 0, 0]
    with httpx.Client(timeout=5) as client, pytest.raises(httpx.RemoteProtocolError):
        client.get(weights.url)


def test_a_part_of_a_file_is_never_of_two_files(weights, fake):
    fake.breaks, fake.replaced = [2], {"adapter_model.safetensors": b"x" * 5120}
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(weights.url, headers={"Range": "bytes=0-4999"})


def test_a_part_is_not_given_of_what_may_be_another_version(weights):
    headers = {"Range": "bytes=0-1", "If-Range": '"version"'}
    answer = httpx.get(weights.url, headers=headers)
    assert (answer.status_code, answer.content) == (200, FILES["adapter_model.safetensors"])


def test_a_link_is_followed_as_who_made_it(offers, connection, fake):
    for key in ("a", "b"):
        made = Connection(connection.server, key=key, headers={"x-team": f"of {key}"}, policy=FAST)
        read(offers.offer_archive(made, PATH).url)
        sent = fake.metadata[-1]
        assert (sent["authorization"], sent["x-team"]) == (f"Bearer {key}", f"of {key}")


@pytest.mark.parametrize("replaced", [b"x" * 5120, b"x" * 3000, b"x" * 9000])
def test_a_file_that_is_replaced_on_the_way_never_comes_whole(archive, weights, fake, replaced):
    fake.listed = {"adapter_model.safetensors": FILES["adapter_model.safetensors"]}
    fake.files["adapter_model.safetensors"] = replaced
    for link in (archive, weights):
        with pytest.raises(http.client.IncompleteRead):
            read(link.url)


def test_a_link_outlives_the_client_that_made_it(archive, connection):
    on_loop(connection.close())
    assert read(archive.url)


def test_no_file_has_to_fit_into_memory(weights, fake):
    """What was not read yet has not been fetched yet, but for what sockets buffer on the way."""
    fake.files["adapter_model.safetensors"] = bytes(32 * 2**20)
    with httpx.stream("GET", weights.url) as answer:
        next(answer.iter_raw(1000))
        assert fake.num_pieces < 0.7 * 32 * 2**20 / PIECE_BYTES
