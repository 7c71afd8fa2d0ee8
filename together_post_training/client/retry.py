"""How failed calls are tried again. Every call of this service may be repeated: retries change nothing twice.
The few that are refused the second time are in `checkpoint_changes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONNECT_TIMEOUT_VARIABLE = "TOGETHER_POST_TRAINING_CONNECT_TIMEOUT"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter, bounded in time. All values are seconds, but for `jitter`, a fraction."""

    # For a server that never answered.
    connect_timeout_s: float = 30.0
    # For one that did.
    outage_timeout_s: float = 300.0
    first_delay_s: float = 0.05
    max_delay_s: float = 5.0
    jitter: float = 0.25

    def delay_s(self, attempt: int, random: float, *, told_s: float | None = None) -> float:
        """How long to wait after failed attempt number `attempt` (0, 1, ...).

        Args:
            random: uniform in [0, 1).
            told_s: what the server asked for. It knows better: the delay is that and up to `jitter` of it more.
        """
        if told_s is not None:
            return max(told_s, self.first_delay_s) * (1 + self.jitter * random)
        backoff = min(self.max_delay_s, self.first_delay_s * 2 ** min(attempt, 30))
        return backoff * (1 + self.jitter * (2 * random - 1))


def policy_from(environ: Mapping[str, str]) -> RetryPolicy:
    """The default policy; the environment may set the connect timeout.

    Raises:
        ValueError: naming the variable and its value.
    """
    text = environ.get(CONNECT_TIMEOUT_VARIABLE)
    if not text:
        return RetryPolicy()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"{CONNECT_TIMEOUT_VARIABLE} is {text!r}: expected a number of seconds above 0."
        )
    return RetryPolicy(connect_timeout_s=seconds)
