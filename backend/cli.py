"""The command line: `together-post-training serve`, `doctor`, `import-adapter`, `export`, and the client's commands.

It works where only the client is installed: what needs the server's packages is imported by the commands that need it.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from backend import doctor, transfer
from backend.config import (
    DEFAULT_MAX_SAMPLING_CALLS,
    DEFAULT_PORT,
    DEFAULT_STORE,
    ServerConfig,
)
from backend.generator.sglang.command import split_arguments
from backend.generator.sglang.options import SglangOptions, parse_generator
from backend.resources.catalog import ModelSpec, parse_spec
from backend.resources.engines import EngineOptions
from together_post_training.cli import execute as client
from together_post_training.cli import parser as client_parser
from together_post_training.errors import PostTrainingError

if TYPE_CHECKING:
    from backend.server import Server

T = TypeVar("T", int, float)
Option = TypeVar("Option")

log = logging.getLogger(__name__)

_PARENT_GONE_GRACE_S = 5.0
_OURS = ("backend", "together_post_training")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    # libgomp reads it when torch is imported, which happens later: with active waiting, two busy processes slow
    # each other tenfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command in client_parser.COMMANDS:
        return client.execute(options)
    if options.format is not None or options.address is not None:
        parser.error(f"--format and --address say nothing about {options.command}: leave them out")
    try:
        return _run(options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OURS:
            raise
        print(
            f"error: {options.command} needs the server's packages, and {error.name} is not installed: "
            "pip install 'together-post-training[server]'",
            file=sys.stderr,
        )
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        return _doctor(options)
    if options.command != "serve":
        return _transfer(options)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # It tells of every request.
    try:
        _check(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _serve(options)


def _doctor(options: argparse.Namespace) -> int:
    if not options.alignment:
        return doctor.run(sys.stdout)
    try:
        return doctor.run_alignment(sys.stdout, options.model, _engine_options(options))
    except PostTrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _transfer(options: argparse.Namespace) -> int:
    try:
        print(options.run(options))
    except (PostTrainingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if not options.model and not options.load_on_demand:
        raise ValueError("nothing to serve: name a --model, or give --load-on-demand")
    names = [spec.name for spec in options.model]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--model {twice[0]} is given twice: every model needs a name of its own, which --model NAME=PATH gives it"
        )
    for name in ("sglang_args", "sglang_dir"):
        if options.generator is None and getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} says nothing without --generator sglang")
    if options.batch_invariant and options.generator is not None:
        raise ValueError(
            "--batch-invariant is for the built-in generator: SGLang's servers have --enable-deterministic-inference "
            "on a GPU, which --sglang-args can give"
        )
    if options.generator and options.sglang_args:
        raise ValueError(
            "--sglang-args are for servers that are started here: those of --generator sglang:URL run already"
        )
    if not options.allow_anonymous and not _is_loopback(options.host):
        raise ValueError(
            f"--host {options.host} can be reached from other machines, and this server does not check API keys yet: "
            "anyone who reaches it may train, sample, read and delete. Listen on 127.0.0.1 (use an SSH tunnel), or "
            "say --allow-anonymous if the network keeps others out."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(options: argparse.Namespace) -> int:
    try:
        status, is_clean = asyncio.run(_run_server(options))
    except PostTrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not is_clean:
        # An engine still computes in its thread, and the interpreter would wait for its libraries.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


async def _run_server(options: argparse.Namespace) -> tuple[int, bool]:
    """(exit status, whether every engine is at rest)."""
    from backend.server import Server

    config = _config(options)
    server = Server(config)
    stopping = _StopRequest(config.grace_s)
    address = await server.start()
    if options.parent_pipe:
        _watch_parent(stopping)
    loading = asyncio.create_task(server.load_models())
    waiting = asyncio.create_task(stopping.event.wait())
    await asyncio.wait([loading, waiting], return_when=asyncio.FIRST_COMPLETED)
    try:
        if loading.done():
            loading.result()
            _announce(options, server, address)
            await waiting
    finally:
        is_clean = await server.stop(stopping.grace_s)
    return 0, is_clean and loading.done()


class _StopRequest:
    """SIGTERM and SIGINT end the server with grace, a second one at once."""

    def __init__(self, grace_s: float) -> None:
        self.event = asyncio.Event()
        self.grace_s = grace_s
        self.loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        if self.event.is_set():
            os._exit(128 + number)
        log.info("%s: stopping; what runs has %g s", number.name, self.grace_s)
        self.event.set()

    def parent_gone(self) -> None:
        self.grace_s = min(self.grace_s, _PARENT_GONE_GRACE_S)
        self.event.set()


def _watch_parent(stopping: _StopRequest) -> None:
    """The parent holds the other end of stdin; the system closes it when the parent ends, however that comes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stopping.loop.call_soon_threadsafe(stopping.parent_gone)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _announce(options: argparse.Namespace, server: Server, address: str) -> None:
    models = ", ".join(spec.name for spec in options.model) or "models on demand"
    print(f"serving {models} on grpc://{address}, store {server.store}", flush=True)
    if options.ready_fd is not None:
        with os.fdopen(options.ready_fd, "w") as ready:
            ready.write(f"{address}\n")


def _config(options: argparse.Namespace) -> ServerConfig:
    return ServerConfig(
        host=options.host,
        port=options.port,
        store=options.store,
        embedded=options.embedded,
        models=tuple(options.model),
        load_on_demand=options.load_on_demand,
        deterministic=options.deterministic,
        engines=_engine_options(options),
        durability=options.durability,
        max_sampling_calls=options.max_sampling_calls,
        snapshot_retention_s=options.snapshot_retention * 3600,
        gap_timeout_s=options.gap_timeout,
        grace_s=options.grace,
    )


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        dtype=options.dtype,
        device=options.device,
        token_budget=options.token_budget,
        activation_bytes=_bytes(options.activation_memory),
        kv_cache_bytes=_bytes(options.kv_cache_memory),
        max_running=options.max_running,
        max_prefill_tokens=options.max_prefill_tokens,
        num_generator_replicas=options.generator_replicas,
        batch_invariant=options.batch_invariant,
        sglang=_sglang_options(options),
    )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def _sglang_options(options: argparse.Namespace) -> SglangOptions | None:
    if options.generator is None:
        return None
    return SglangOptions(
        urls=options.generator,
        python=options.sglang_python,
        arguments=options.sglang_args,
        directory=options.sglang_dir,
    )


def _model(text: str) -> ModelSpec:
    try:
        return parse_spec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="together-post-training",
        description="Post-training as a service that you run yourself.",
    )
    client_parser.add_options(parser, at_the_top=True)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_doctor(commands)
    serve = commands.add_parser(
        "serve",
        help="train and sample for clients",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_what_to_serve(serve)
    _add_how_to_compute(serve)
    _add_where_to_listen(serve)
    _add_how_to_end(serve)
    transfer.add_commands(commands, _model)
    client_parser.add_commands(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what is installed and what a script would get",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--alignment",
        action="store_true",
        help="measure instead how far the generator's log-probabilities are from the trainer's, for the base model, "
        "adapters and full weights at several temperatures; the other options say with which engines",
    )
    parser.add_argument(
        "--model", type=_model, default="builtin:tiny", metavar="NAME[=PATH]", help="as for serve"
    )
    _add_how_to_compute(parser)


def _add_what_to_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--model",
        action="append",
        default=[],
        type=_model,
        metavar="NAME[=PATH]",
        help="builtin:tiny, builtin:smollm2-135m, builtin:bigram16 (16 tokens, exact), a directory, or a Hugging Face "
        "id that is in the local cache; may be repeated. With =PATH, clients call it NAME",
    )
    serve.add_argument(
        "--load-on-demand",
        action="store_true",
        help="also load other models when they are asked for",
    )
    serve.add_argument(
        "--deterministic",
        action="store_true",
        help="never run small passes of several sessions together: each session's numbers are then, to the bit, those "
        "of a session that has the server for itself (slower for many small clients)",
    )
    serve.add_argument("--store", type=Path, default=DEFAULT_STORE, help="where work is kept")
    serve.add_argument(
        "--embedded",
        action="store_true",
        help="take a free part of the store, beside other servers that use it",
    )
    serve.add_argument(
        "--snapshot-retention",
        type=_positive(float),
        default=24.0,
        metavar="HOURS",
        help="how long published weights are kept that are not their session's newest and that nobody says to hold: of "
        "clients that died, or do not say. What a live client holds is kept as long as it does, and ten minutes more",
    )
    serve.add_argument(
        "--durability",
        choices=("process", "machine"),
        default="process",
        help="what acknowledged work survives: the end of the process, or also a power failure (slower)",
    )


def _add_how_to_compute(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="what the model's weights are kept in; auto: float32 on a CPU, bfloat16 on a GPU. On a CPU bfloat16 "
        "halves their memory and computes in float32; adapters and log-probabilities are float32 always",
    )
    serve.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU if it has one",
    )
    serve.add_argument(
        "--token-budget",
        type=_positive(int),
        metavar="N",
        help="tokens that go through the trainer at once, unless a single sample has more; None: by what memory is "
        "free, at most 1024 on a CPU",
    )
    serve.add_argument(
        "--generator-replicas",
        type=_positive(int),
        default=1,
        metavar="N",
        help="generators of each model, among which calls are shared out by load and by the prefixes that each has "
        "read before. The built-in ones share the trainer's weights and its device: there, each more has a cache and a "
        "thread of its own, and on a CPU no more cores",
    )
    serve.add_argument(
        "--max-sampling-calls",
        type=_positive(int),
        default=DEFAULT_MAX_SAMPLING_CALLS,
        metavar="N",
        help="calls for samples and scores that are held at a time, waiting or running; clients try again when there "
        "are more",
    )
    serve.add_argument(
        "--activation-memory",
        type=_positive(float),
        metavar="GIB",
        help="memory for what a pass keeps for its backward pass; layers of samples that need more are computed twice; "
        "None: half of what is free at the start",
    )
    serve.add_argument(
        "--kv-cache-memory",
        type=_positive(float),
        metavar="GIB",
        help="memory of each built-in generator for keys and values, of what is sampled and of prompts that were read "
        "before; None: 2, or more if the model's window needs it",
    )
    serve.add_argument(
        "--max-running",
        type=_positive(int),
        default=128,
        metavar="N",
        help="samples that a built-in generator computes at once; the others wait, in turns that are fair to all",
    )
    serve.add_argument(
        "--max-prefill-tokens",
        type=_positive(int),
        default=512,
        metavar="N",
        help="tokens of prompts that a built-in generator reads between two tokens of the samples that run; more read "
        "prompts a little faster, and let those wait longer",
    )
    _add_generator(serve)


def _add_generator(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--batch-invariant",
        action="store_true",
        help="sample so that the same request gives the same log-probabilities, to the bit, whatever else is sampled: "
        "on a CPU, at 0.4 to 0.8 of the speed. Without it they move by about 1e-6",
    )
    serve.add_argument(
        "--generator",
        type=_read_as(parse_generator),
        default="embedded",
        metavar="embedded|sglang|sglang:URL[,URL]",
        help="what samples: the built-in engine; SGLang servers that are started for each model and end with this one; "
        "or those that run at these addresses, started for the same model with --enable-lora, --lora-target-modules "
        "all and SGLANG_RETURN_ORIGINAL_LOGPROB=1",
    )
    serve.add_argument(
        "--sglang-python",
        default=sys.executable,
        metavar="PATH",
        help="the interpreter of the environment that has SGLang, for servers that are started",
    )
    serve.add_argument(
        "--sglang-args",
        type=_read_as(split_arguments),
        default="",
        metavar="'ARGS'",
        help="more arguments for servers that are started, as for sglang.launch_server: --sglang-args='--tp 2'. "
        "They override those that are chosen here",
    )
    serve.add_argument(
        "--sglang-dir",
        type=Path,
        metavar="PATH",
        help="where snapshots are written for SGLang's servers, which must see them under the same path; None: in the "
        "store",
    )


def _read_as(read: Callable[[str], Option]) -> Callable[[str], Option]:
    """Reads an option. `read`: raises ValueError, saying what is accepted."""

    def parse(text: str) -> Option:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _positive(kind: Callable[[str], T]) -> Callable[[str], T]:
    what = "a whole number" if kind is int else "a number"
    return _number(kind, f"{what} above 0", lambda value: 0 < value < math.inf)


def _number(
    kind: Callable[[str], T], accepted: str, fits: Callable[[T], bool]
) -> Callable[[str], T]:
    """Reads an option. `accepted`: what `fits`, in words."""

    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r}: it must be {accepted}")
        return value

    return parse


def _add_where_to_listen(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--port",
        type=_number(int, "0 to 65535", lambda port: 0 <= port <= 65535),
        default=DEFAULT_PORT,
        help="0 picks a free one",
    )
    serve.add_argument("--host", default="127.0.0.1", help="where to listen")
    serve.add_argument(
        "--allow-anonymous",
        action="store_true",
        help="listen on an address that others can reach, although anyone who reaches it may do anything",
    )
    serve.add_argument(
        "--ready-fd", type=int, metavar="FD", help="write the address to this descriptor when ready"
    )


def _add_how_to_end(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--parent-pipe", action="store_true", help="end when stdin is closed, as a child process"
    )
    serve.add_argument(
        "--grace",
        type=_number(float, "a number of seconds, 0 or above", lambda s: 0 <= s < math.inf),
        default=30.0,
        metavar="S",
        help="how long SIGTERM waits for what runs",
    )
    serve.add_argument(
        "--gap-timeout",
        type=_positive(float),
        default=60.0,
        metavar="S",
        help="how long a missing operation of a silent caller is waited for",
    )
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
