"""What a caller should know of an operation though it succeeded: its warnings, each kind once per session."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from backend.operations.session import Session
from backend.trainer.base import DimuonParams, OptimParams, Pass
from backend.trainer.dimuon import DIMUON_NOTICE
from together_post_training import losses
from together_post_training.alignment import Alignment
from together_post_training.v1 import operations_pb2 as pb

log = logging.getLogger(__name__)

# By kind, which is a few words for the log: "a warning about its ...".
Notices = Mapping[str, str]


def notices_of(work: Pass, alignment: Alignment) -> Notices:
    """Of a pass that has run. Called on the trainer's thread."""
    notices: dict[str, str] = {}
    notice = losses.contract(work.loss).notice
    if notice:
        notices[f"loss {work.loss}"] = notice
    prompts = losses.prompt_notice(work.loss, work.params, [s.inputs for s in work.samples])
    if prompts is not None:
        notices["unmasked prompts"] = prompts
    offsets = losses.offsets_notice(work.loss, work.params)
    if offsets is not None:
        notices["clip bounds"] = offsets
    if alignment.warning is not None:
        # Targets of a teacher are no reason not to be told of shifted logprobs later.
        are_targets = alignment.metrics["alignment_shifted_targets:sum"] > 0
        notices[f"alignment of {'targets' if are_targets else 'logprobs'}"] = alignment.warning
    return notices


def notices_of_step(params: OptimParams) -> Notices:
    return {"optimiser Dimuon": DIMUON_NOTICE} if isinstance(params, DimuonParams) else {}


def give(session: Session, operation: pb.Operation, notices: Notices) -> None:
    """Adds those that are new to the session to the operation's warnings. Called on the event loop."""
    for kind, text in notices.items():
        if kind in session.warned_of:
            continue
        session.warned_of.add(kind)
        operation.warnings.append(text)
        # Not the text: it may quote what a caller sent.
        log.warning("session %s: gave its caller a warning about its %s", session.id, kind)
