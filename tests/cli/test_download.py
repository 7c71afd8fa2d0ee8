"""A download is there whole or not at all, goes on where it broke off, and stays where it was told to be."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Outcome, Typed
from tests.cli.hostile import PATH, PIECE, Hostile, serving_hostile
from tests.services.harness import Running
from together_post_training.cli import placing
from together_post_training.cli.client import CommandError
from together_post_training.cli.download import check_files
from together_post_training.cli.records import File

FILES = {"adapter_model.safetensors": os.urandom(5 * PIECE + 7), "adapter_config.json": b"{}"}
NAME = "run_weights_a"
PARTIAL = f".{NAME}.partial"


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with serving_hostile(dict(FILES)) as served:
        yield served


@pytest.fixture
def download(typed: Typed, hostile: Hostile) -> Typed:
    return lambda *options: typed(
        "checkpoint", "download", PATH, "--address", hostile.address, *options
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def refused(outcome: Outcome, said: str) -> None:
    assert outcome.status == 1
    assert outcome.out == ""
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
    assert not Path(NAME).exists()


def test_checkpoint_of_a_server_arrives_as_the_files_that_peft_reads(ask: Typed, server: Running):
    run = server.caller.session(id="mine:train:0")
    run.train([1, 2, 3])
    run.save("a", "INFERENCE")
    path = run.path("a", "sampler_weights")
    done = ask("checkpoint", "download", path, "-o", "models/new", "-f", "json").document
    directory = Path("models/new/mine:train:0_sampler_weights_a")
    assert done["destination"] == str(directory)
    listed = ask("checkpoint", "info", path, "-f", "json").document["files"]
    found = contents(directory)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= found.keys()
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    assert hashes == {file["name"]: file["sha256"] for file in listed}
    assert done["file_size_bytes"] == sum(map(len, found.values()))
    assert [path.name for path in Path("models/new").iterdir()] == [directory.name]


def test_download_prints_nothing_but_its_result_in_a_pipe(download: Typed):
    outcome = download()
    assert (outcome.status, outcome.err) == (0, "")
    assert NAME in outcome.out
    assert contents(Path(NAME)) == FILES


def test_download_goes_on_where_the_connection_broke(download: Typed, hostile: Hostile):
    hostile.break_after = [2, 1]
    assert download().status == 0
    offsets = [r.offset for r in hostile.requests if r.filename == "adapter_model.safetensors"]
    assert offsets == [0, 2 * PIECE, 3 * PIECE]
    assert contents(Path(NAME)) == FILES


def test_download_goes_on_where_a_killed_one_ended(download: Typed, hostile: Hostile):
    partial = Path(PARTIAL)
    partial.mkdir()
    (partial / "adapter_model.safetensors").write_bytes(FILES["adapter_model.safetensors"][:1500])
    (partial / "adapter_config.json").write_bytes(FILES["adapter_config.json"])
    (partial / "of_another.bin").write_bytes(b"x")
    assert download().status == 0
    assert [(r.filename, r.offset) for r in hostile.requests] == [
        ("adapter_model.safetensors", 1500)
    ]
    assert contents(Path(NAME)) == FILES
    assert not partial.exists()


@pytest.mark.parametrize("left", [b"other bytes", b"z" * 9000], ids=["shorter", "longer"])
def test_download_starts_over_when_what_is_left_was_of_something_else(download: Typed, left: bytes):
    Path(PARTIAL).mkdir()
    (Path(PARTIAL) / "adapter_model.safetensors").write_bytes(left)
    assert download().status == 0
    assert contents(Path(NAME)) == FILES


def test_download_that_gives_up_leaves_only_what_the_next_one_goes_on_with(
    download: Typed, hostile: Hostile
):
    hostile.break_after = [1, 0, 0, 0]
    refused(download(), "Lost the connection")
    assert [path.name for path in Path().iterdir()] == [PARTIAL]
    assert download().status == 0
    assert hostile.requests[-2].offset == PIECE
    assert contents(Path(NAME)) == FILES


def test_damaged_file_is_refused_and_fetched_anew_the_next_time(download: Typed, hostile: Hostile):
    data = FILES["adapter_model.safetensors"]
    hostile.sent["adapter_model.safetensors"] = bytes([data[0] ^ 1]) + data[1:]
    refused(download(), "another SHA-256")
    hostile.sent.clear()
    assert download().status == 0
    assert contents(Path(NAME)) == FILES


@pytest.mark.parametrize("sent", [b"", b"short", b"x" * 20 * PIECE], ids=["none", "less", "more"])
def test_file_of_another_length_is_refused(download: Typed, hostile: Hostile, sent: bytes):
    hostile.sent["adapter_model.safetensors"] = sent
    refused(download(), "adapter_model.safetensors")


def test_pieces_of_other_files_and_places_are_refused(download: Typed, hostile: Hostile):
    def rename(piece):
        piece.filename = "../../evil"

    def move(piece):
        piece.offset += 1

    for change in (rename, move):
        hostile.change = change
        refused(download(), "adapter_model.safetensors")


BAD_NAMES = [
    "../evil", "/etc/evil", "a/b", "..", ".", "", ".hidden", "a\\b", "c:evil", "new\nline", "\x1b[2J", "nul\0",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_would_leave_the_directory_are_refused(download: Typed, hostile: Hostile, name):
    hostile.listed[name] = b"x"
    outcome = download()
    refused(outcome, "no plain file name")
    assert "\x1b" not in outcome.err
    assert list(Path().iterdir()) == []
    assert hostile.requests == []


@given(st.text())
def test_every_accepted_name_stays_a_direct_child_of_its_directory(name: str):
    record = None
    try:
        check_files(record, [File(name=name, size_bytes=0, sha256="")])  # pyright: ignore[reportArgumentType]
    except CommandError:
        return
    assert os.path.normpath(os.path.join("/d", name)) == f"/d/{name}"
    assert name not in ("", ".", "..")


def test_names_that_some_file_systems_take_for_one_are_refused(download: Typed, hostile: Hostile):
    hostile.listed["ADAPTER_CONFIG.JSON"] = b"x"
    refused(download(), "no plain file name")


def test_what_is_there_is_replaced_only_with_force(download: Typed, hostile: Hostile):
    directory = Path(NAME)
    directory.mkdir()
    (directory / "mine").write_text("mine")
    outcome = download()
    assert outcome.status == 1
    assert "--force" in outcome.err
    assert hostile.requests == []
    assert contents(directory) == {"mine": b"mine"}
    assert download("--force").status == 0
    assert contents(directory) == FILES
    assert [path.name for path in Path().iterdir()] == [NAME]


def test_force_replaces_nothing_when_the_download_fails(download: Typed, hostile: Hostile):
    Path(NAME).mkdir()
    (Path(NAME) / "mine").write_text("mine")
    hostile.sent["adapter_model.safetensors"] = b"short"
    assert download("--force").status == 1
    assert contents(Path(NAME)) == {"mine": b"mine"}


def test_force_replaces_a_link_and_not_what_it_points_to(download: Typed, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    Path(NAME).symlink_to(elsewhere)
    assert download("--force").status == 0
    assert contents(elsewhere) == {"mine": b"mine"}
    assert not Path(NAME).is_symlink()
    assert contents(Path(NAME)) == FILES


def test_links_that_lie_in_wait_are_not_followed(download: Typed, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    Path(PARTIAL).mkdir()
    (Path(PARTIAL) / "adapter_model.safetensors").symlink_to(victim)
    assert download().status == 1
    assert victim.read_bytes() == b""
    (Path(PARTIAL) / "adapter_model.safetensors").unlink()
    Path(PARTIAL).rmdir()
    Path(PARTIAL).symlink_to(tmp_path)
    refused(download(), "not a directory of yours")


def test_directory_that_somebody_else_made_in_wait_is_not_used(download: Typed, monkeypatch):
    Path(PARTIAL).mkdir()
    somebody_else = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody_else)
    refused(download(), "not a directory of yours")


def test_two_downloads_to_one_place_do_not_meet(download: Typed):
    Path(PARTIAL).mkdir()
    held = os.open(PARTIAL, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refused(download(), "Another process is downloading")
    os.close(held)
    assert download().status == 0


def test_archive_holds_the_files_at_its_top(download: Typed):
    assert download("--archive", "deep/out.tar").status == 0
    with tarfile.open("deep/out.tar") as archive:
        assert {m.name: archive.extractfile(m).read() for m in archive} == FILES  # pyright: ignore
    assert [path.name for path in Path("deep").iterdir()] == ["out.tar"]
    first = Path("deep/out.tar").read_bytes()
    outcome = download("--archive", "deep/out.tar")
    assert outcome.status == 1
    assert "--force" in outcome.err
    assert download("--archive", "deep/out.tar", "--force").status == 0
    assert Path("deep/out.tar").read_bytes() == first


def test_archive_that_fails_is_not_there(download: Typed, hostile: Hostile):
    hostile.sent["adapter_model.safetensors"] = b"short"
    assert download("--archive", "out.tar").status == 1
    assert not Path("out.tar").exists()


def test_progress_is_shown_on_a_terminal_alone(download: Typed, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    outcome = download()
    assert outcome.status == 0
    assert "adapter_model.safetensors" in outcome.err
    assert "adapter_model.safetensors" not in outcome.out


def test_place_that_cannot_be_written_is_told_in_one_line(download: Typed):
    Path("file").write_text("")
    outcome = download("-o", "file")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1


def test_directory_that_is_taken_meanwhile_is_left_alone(tmp_path: Path):
    target = tmp_path / "target"
    with placing.held_scratch(target) as scratch:
        (scratch / "a").write_text("new")
        target.mkdir()
        with pytest.raises(CommandError, match="exists already"):
            placing.put_directory(scratch, target, force=False)
    assert list(target.iterdir()) == []
