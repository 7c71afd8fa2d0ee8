"""Dimuon, an optimiser of Tinker's: its parameters are public, its formula is not.

What stands behind the name here is an interpretation:

    Dimuon(learning_rate, beta1) = Muon(learning_rate, momentum = beta1, 5 Newton-Schulz steps, no weight decay),
                                   updates scaled by 0.2 * sqrt(max(rows, columns))

The parameters' documentation (tinker.types.DimuonParams) calls beta1 the "EMA coefficient for the momentum", which is
what torch.optim.Muon's momentum is. Tensors of full weights that Muon does not step take AdamW of the same learning
rate and beta1, which fits that scaling (Liu et al. 2025, arXiv:2502.16982).
"""

from __future__ import annotations

from backend.trainer.base import AdamParams, DimuonParams, MuonParams

DIMUON_NOTICE = (
    "Dimuon's formula is not public. This server steps with Muon: momentum beta1, updates scaled by "
    "0.2 * sqrt(max(rows, columns)), 5 Newton-Schulz steps, no weight decay. Results may differ from Tinker's."
)


def as_muon(params: DimuonParams) -> MuonParams:
    return MuonParams(
        learning_rate=params.learning_rate,
        momentum=params.beta1,
        newton_schulz_steps=5,
        weight_decay=0.0,
        grad_clip_norm=params.grad_clip_norm,
        adam=AdamParams(learning_rate=params.learning_rate, beta1=params.beta1, eps=1e-8),
    )
