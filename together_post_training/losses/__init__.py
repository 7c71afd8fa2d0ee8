"""Losses as pure functions of target log-probabilities.

A loss reads, for one sample, the log-probabilities lp of its targets and its other inputs, and gives the loss,
the derivative d loss / d lp and metrics, all in float64. Every engine trains through this one derivative, and
custom objectives enter at the same point with a derivative of their own.

Notation: p the current policy, q the sampling policy (`logprobs` input), r = p/q, A advantages, w weights
(default 1). All losses are sums over positions, with no normalisation by tokens, sequences or batch; grpo alone
divides, as its caller chooses.

Terms whose weight or advantage makes them zero contribute exactly zero, even where the ratio overflows: they are
left out, not multiplied by zero.
"""

from together_post_training.losses.base import Choice, LossContract, LossValue, Number, Params
from together_post_training.losses.cispo import cispo
from together_post_training.losses.cross_entropy import cross_entropy
from together_post_training.losses.dppo import dppo
from together_post_training.losses.dro import dro
from together_post_training.losses.evaluation import evaluate
from together_post_training.losses.grpo import grpo
from together_post_training.losses.gspo import gspo
from together_post_training.losses.importance_sampling import importance_sampling
from together_post_training.losses.metrics import summarize
from together_post_training.losses.offsets import offsets_notice
from together_post_training.losses.params import complete_params
from together_post_training.losses.ppo import ppo
from together_post_training.losses.preparation import for_whole_call, prepare
from together_post_training.losses.prompts import prompt_notice
from together_post_training.losses.stable_reinforce import stable_reinforce
from together_post_training.losses.table import CONTRACTS, contract

__all__ = [
    "CONTRACTS",
    "Choice",
    "LossContract",
    "LossValue",
    "Number",
    "Params",
    "cispo",
    "complete_params",
    "contract",
    "cross_entropy",
    "dppo",
    "dro",
    "evaluate",
    "for_whole_call",
    "grpo",
    "gspo",
    "importance_sampling",
    "offsets_notice",
    "ppo",
    "prepare",
    "prompt_notice",
    "stable_reinforce",
    "summarize",
]
