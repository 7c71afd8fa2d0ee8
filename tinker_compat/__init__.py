"""Tinker's names over the native client.

    -import tinker
    +import together.post_training.tinker as tinker

Clients and futures are ours. Types, exceptions and everything else are the genuine objects of the `tinker` package,
so that `isinstance(x, tinker.Datum)` and `except tinker.BadRequestError` hold in libraries that import it themselves.

What differs from Tinker's own SDK:

- Data is read when the call is made: changing a Datum afterwards changes nothing. What cannot be sent is refused at
  the call.
- Every future is a concurrent.futures.Future too. Cancelling one also cancels on the server what has not started.
- An operation that follows an unseen failure in its gradient window fails, instead of stepping on half a batch.
- A checkpoint name that is taken gives ConflictError at once, not after minutes of retries.
- Nothing is deprecated: no FutureWarning for the older spellings. No telemetry.
- Ignored with a warning: retry_config, weights_access_token, project_id, unknown arguments of ServiceClient.
- What the server warns of, e.g. of samples that look shifted, is shown where the next result is handed over, once.
- Dimuon's formula is not public: it is Muon here, and its first step says so. Muon itself is there too
  (`tinker_compat.optimizers`).
- Links to checkpoints are answered by this process: they work on this machine and end with it.
- There are no accounts, projects or console: every run is yours, get_console_url only names it, and AdminClient and
  RestClient's get_audit_log, get_billing_usage, assign_session_project and export_session_trace are refused by name.

`tests/compat/test_parameters.py` lists every parameter of Tinker's and which of these it is.
"""

from __future__ import annotations

import importlib
from typing import Any

import tinker as _tinker
from tinker import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary]

from tinker_compat import additions as _additions
from tinker_compat import aliases as _aliases
from tinker_compat import children as _children
from tinker_compat.loss_handle import LossHandle, PerDatumLossFn
from tinker_compat.rest_client import RestClient
from tinker_compat.sampling_client import BackcompatSamplingClientFuture, SamplingClient
from tinker_compat.service_client import ServiceClient
from tinker_compat.substitution import Substitution as _Substitution
from tinker_compat.training_client import BackcompatTrainingClientFuture, TrainingClient
from tinker_compat.unsupported import AdminClient

# What the installed version lacks and another has.
_missing = _additions.missing("")
globals().update(_missing)
# Submodules of ours whose names the star import took for Tinker's.
_aliases.register()
auth = importlib.import_module(f"{__name__}.auth")
types = importlib.import_module(f"{__name__}.types")
_substitution = _Substitution()

__all__ = _tinker.__all__ + [  # noqa: RUF005 - the one form that linters and type checkers read
    "AdminClient",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    "auth",
    *_missing,
]


def install() -> None:
    """Makes the name `tinker` give our clients in this process and in those that it starts with multiprocessing.

    For libraries that import `tinker` themselves; `python -m tinker_compat` does it for a whole program. Call it before
    they are imported.

    Raises:
        RuntimeError: naming what already uses Tinker's own clients. Nothing is changed then.
    """
    _substitution.make()
    _children.set_up(install)


def uninstall() -> None:
    """Gives `tinker` its own clients back. What was imported in between keeps ours."""
    _substitution.undo()
    _children.forget(install)


def __getattr__(name: str) -> Any:
    """What tinker has without exporting it: submodules and a few classes."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if lack := _additions.explain_lack(name):
        raise AttributeError(lack)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    return getattr(_tinker, name)
