"""What the torch trainer asks of a session's trainable weights, whatever they are: an adapter, or a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from backend.trainer.base import OptimizerConfig, OptimizerState, OptimParams, Weights
from backend.trainer.dropout import SampleRows
from backend.trainer.lora import Segment
from backend.trainer.row_cost import Cost

if TYPE_CHECKING:
    from backend.trainer.packed_model import PackedRow


class RowForward(Protocol):
    """A row that went through a model's body. E targets; see `packed_model.Forward`."""

    def logprobs(self) -> Tensor: ...

    def backward(self, gradient: Tensor) -> None: ...

    def score_and_backward(self, gradient: Tensor) -> Tensor: ...


class RowModel(Protocol):
    """Computes packed rows; see `packed_model.PackedModel.forward`. cost: of doing so."""

    @property
    def cost(self) -> Cost: ...

    def forward(
        self,
        row: PackedRow,
        segments: Sequence[Segment],
        *,
        for_backward: bool = False,
        recompute: bool = False,
    ) -> RowForward: ...


class Slot(Protocol):
    """One session's weights, gradients and moments. Owned by the trainer's thread."""

    @property
    def optimizer_config(self) -> OptimizerConfig: ...

    @property
    def own_model(self) -> RowModel | None:
        """Where its rows are computed; None: on the frozen base, which its passes share with other sessions'."""
        ...

    def segment(self, start: int, samples: Sequence[SampleRows], *, for_backward: bool) -> Segment:
        """The tokens of these samples of a pass, which follow each other in a row from `start` on, under this session's
        weights. Numbers are those within the pass."""
        ...

    def begin_pass(self) -> None:
        """What models add from here on is this pass's gradient."""
        ...

    def commit_pass(self, num_samples: int) -> None:
        """Adds the gradient of the pass, which had that many samples, to the window's.

        Raises:
            PostTrainingError: NON_FINITE_LOSS, naming the first tensor; nothing is added.
        """
        ...

    # As the trainer's methods of these names; see `backend.trainer.base.Trainer`.

    @property
    def has_gradients(self) -> bool: ...

    def clear_gradients(self) -> None: ...

    def optim_step(self, params: OptimParams) -> dict[str, float]: ...

    def copy_weights(self) -> Weights: ...

    def optimizer_state(self) -> OptimizerState: ...

    def load(self, weights: Weights, optimizer: OptimizerState | None) -> None: ...
