"""Who holds which snapshots. Pure.

A holder is a client process. It says now and then what it holds, all of it; what it leaves out, it has let go. One
that is silent for too long is taken for dead. It cannot be told from one whose machine sleeps, so what it held was
never let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class _Holder:
    names: frozenset[str]
    heard_s: float
    is_silent: bool = False


class Leases:
    """`lease_s`: how long a holder may be silent. Times are seconds of one clock that never goes back."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._holders: dict[str, _Holder] = {}
        # How many hold each, and how many did when they fell silent.
        self._held: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._let_go: set[str] = set()

    def hold(self, holder: str, names: Iterable[str], now: float) -> frozenset[str]:
        """Returns what it held before and has let go."""
        before = self._remove(holder)
        claims = frozenset(names)
        if claims:
            self._holders[holder] = _Holder(names=claims, heard_s=now)
            self._held.update(claims)
        self._let_go -= claims
        gone = before - claims
        self._let_go |= gone
        return gone

    def expire(self, now: float) -> frozenset[str]:
        """Returns what the holders held that are silent for too long as of now."""
        gone: set[str] = set()
        for holder in self._holders.values():
            if not holder.is_silent and now - holder.heard_s > self.lease_s:
                holder.is_silent = True
                self._held -= Counter(holder.names)
                self._left.update(holder.names)
                gone |= holder.names
        return frozenset(gone)

    def let_go(self, name: str) -> None:
        """Nobody has any more use for it, but for those who hold it or will."""
        self._let_go.add(name)

    def held_by(self, holder: str) -> frozenset[str]:
        """What it said last that it holds, however long ago."""
        known = self._holders.get(holder)
        return frozenset() if known is None else known.names

    def is_held(self, *names: str) -> bool:
        """Any of them, by a holder that is not silent."""
        return any(self._held[name] for name in names)

    def is_let_go(self, *names: str) -> bool:
        """One of them was let go, and all who ever held any said that they do not any more."""
        is_free = not any(self._held[name] or self._left[name] for name in names)
        return is_free and any(name in self._let_go for name in names)

    def forget(self, name: str) -> None:
        """The snapshot is gone."""
        self._let_go.discard(name)
        for holder in [h for h, known in self._holders.items() if name in known.names]:
            known = self._holders[holder]
            known.names -= {name}
            if not known.names:
                del self._holders[holder]
        del self._held[name], self._left[name]

    def _remove(self, holder: str) -> frozenset[str]:
        known = self._holders.pop(holder, None)
        if known is None:
            return frozenset()
        counts = self._left if known.is_silent else self._held
        counts -= Counter(known.names)  # Drops those that nobody is left for.
        return known.names
