"""Prompts that a loss takes in by mistake are told of; what counts is for the caller to say."""

from __future__ import annotations

from collections.abc import Sequence

from together_post_training.losses.base import Inputs, Params


def prompt_notice(name: str, params: Params, batch: Sequence[Inputs]) -> str | None:
    """One sentence if a loss that takes in positions without an advantage seems to include a prompt, None otherwise.

    Callers fill a prompt's sampling logprobs and advantages with 0. Losses in which the advantage is a factor then
    leave it out by themselves; a mean over positions and a penalty do not, and a log-ratio taken from such a 0 means
    nothing.

    `params` are complete.
    """
    mask = _mask_of(name, params)
    if mask is None:
        return None
    for i, inputs in enumerate(batch):
        is_filled = inputs["logprobs"][0] == 0 and inputs["advantages"][0] == 0
        if is_filled and mask not in inputs and inputs["advantages"].any():
            return (
                f"Sample {i}: position 0 has neither an advantage nor a sampling logprob, as positions of a prompt "
                f"have, but loss {name!r} takes in all positions of samples without {mask}. Give {mask}, 0 at the "
                "prompt and 1 at the sampled tokens."
            )
    return None


def _mask_of(name: str, params: Params) -> str | None:
    """The input that says what a loss of means or penalties takes in, if it has them."""
    if name == "gspo":
        return "sequence_ratio_mask"
    takes_in_all = (
        params.get("agg_type") in ("TOKEN_MEAN", "SEQUENCE_MEAN")
        or params.get("ratio_type") == "SEQUENCE"
        or (name in ("dro", "grpo") and params.get("beta"))
    )
    return "weights" if takes_in_all else None
