"""`model list` and `version`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from together_post_training.cli import records
from together_post_training.cli.client import Client, CommandError, connected
from together_post_training.cli.output import Table, say, show
from together_post_training.cli.records import Model
from together_post_training.cli.text import NONE, counted, yes_no
from together_post_training.v1 import catalog_pb2

_PACKAGE = "together-post-training"


def list_models(options: argparse.Namespace, client: Client) -> None:
    found = client.call("catalog.ListModels", catalog_pb2.ListModelsRequest()).models
    wanted = (options.substring or "").lower()
    models = [records.model(message) for message in found if wanted in message.name.lower()]
    if wanted and not models:
        raise CommandError(
            f"No model's name contains {options.substring!r}: `model list` shows those that this server has."
        )
    show(options.format, {"models": models}, model_table(models))


def model_table(models: Sequence[Model]) -> Table:
    return Table(
        title=counted(len(models), "model") if models else "No models found",
        columns=("Model", "Max Context", "Trainable", "Sampleable", "Loaded"),
        rows=[
            (
                model.model_name,
                NONE if model.max_context_length is None else str(model.max_context_length),
                yes_no(model.trainable),
                yes_no(model.sampleable),
                yes_no(model.loaded),
            )
            for model in models
        ],
    )


def show_version(options: argparse.Namespace) -> None:
    """The client's; the server's too where --address says which."""
    versions = {"version": _version(_PACKAGE), "tinker": _version("tinker")}
    sentence = f"{_PACKAGE} {versions['version']} (tinker {versions['tinker']})"
    if options.address is not None:
        with connected(options.address, os.environ) as client:
            info = client.call("catalog.GetServerInfo", catalog_pb2.GetServerInfoRequest())
        versions["server"] = info.version
        sentence += f", server {info.version}"
    say(options.format, versions, sentence)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
