"""How a server is set up. The command line fills this in; tests build it directly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.operations.database import Durability
from backend.resources.catalog import ModelSpec
from backend.resources.engines import DEFAULT_OPTIONS, EngineOptions

DEFAULT_PORT = 50051
DEFAULT_MAX_SAMPLING_CALLS = 32_768
DEFAULT_STORE = Path("~/.local/share/together-post-training")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Where to listen."""
    port: int = DEFAULT_PORT
    """0: any free one."""
    store: Path = DEFAULT_STORE
    """The directory that the server keeps its work in."""
    embedded: bool = False
    """Take a free part of the store: any number of such servers may run on one store, beside one that is not."""
    models: tuple[ModelSpec, ...] = ()
    """Loaded at the start."""
    load_on_demand: bool = False
    """Also serve any other model that the engines find, from when it is first asked for."""
    deterministic: bool = False
    """Run the passes of each session alone: its numbers are then, to the bit, those of a session that had the server
    for itself, whatever others do."""
    engines: EngineOptions = DEFAULT_OPTIONS
    """How they compute, and in how much memory."""
    durability: Durability = "process"
    """What acknowledged work survives: the death of the server's process, or also of its machine."""
    gap_timeout_s: float = 60.0
    """How long a missing sequence number is waited for after the session's last sign of life."""
    max_held: int = 1024
    """How many sequence numbers ahead of a missing one are accepted."""
    max_resident_snapshots: int = 16
    """How many snapshots of a model resource stay in memory; the others wait in the store."""
    grace_s: float = 30.0
    """How long what is running may go on after SIGTERM."""
    gap_check_interval_s: float = 1.0
    """How often missing numbers of silent callers are looked for."""
    checkpoint_sweep_interval_s: float = 30.0
    """How often expired checkpoints, which nobody sees any more, are removed from the disk."""
    snapshot_lease_s: float = 600.0
    """How long a client that holds snapshots may be silent before it is taken for dead, and how long a snapshot that
    was let go of is kept for whoever may be about to hold it."""
    snapshot_retention_s: float = 24 * 3600.0
    """How long a published snapshot that is not its session's newest is kept though nobody holds or uses it: those of
    clients that died, or that never held any."""
    snapshot_sweep_interval_s: float = 30.0
    """How often snapshots that are kept no longer are looked for."""
    max_sampling_calls: int = DEFAULT_MAX_SAMPLING_CALLS
    """How many calls for samples and scores are held at a time: waiting, running, or answered and not fetched yet. One
    session, or one connection that samples from base models and checkpoints, may hold as many as it leaves to others,
    which is half when it is alone. More are refused, and clients try again."""
    max_sampling_bytes: int = 256 * 1024 * 1024
    """The same for the bytes of their requests and answers."""
    max_message_bytes: int = 256 * 1024 * 1024
    """The largest request and response."""
