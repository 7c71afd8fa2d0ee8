"""Live policies: what each session published last, and the calls that follow it from one version to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from backend.operations.session import Session
from backend.resources.resource import Resource
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.names import live_session, live_snapshot
from together_post_training.v1.generator_pb2 import Snapshot

_CANNOT_MOVE = (
    "Samples that run go on under the weights that they began with: this generator cannot move them. Their policy "
    "segments say which those are; new samples use the new weights."
)


@dataclass(slots=True, kw_only=True, eq=False)
class Use:
    """The weights that answer a call. They stay in memory until it ends.

    engine_name: the generator's name for them; None: the base model. Calls that follow must enter the generator
        without waiting for anything else: it may be another one then.
    snapshots: by the generator's names, all weights that the call has been answered from.
    until_end: gives back what the call holds.
    """

    resource: Resource
    engine_name: str | None
    snapshots: dict[str | None, Snapshot]
    follows: bool = False
    until_end: ExitStack = field(default_factory=ExitStack)


@dataclass(slots=True, kw_only=True, eq=False)
class LivePolicy:
    """target: what calls that begin now are answered from. followers: the calls that run.

    for_followers: the target was published for them.
    """

    session: Session
    target: Snapshot
    for_followers: bool
    followers: set[Use] = field(default_factory=set)

    @property
    def name(self) -> str:
        return live_snapshot(self.session.id)

    def message(self) -> Snapshot:
        return Snapshot(
            name=self.name,
            base_model=self.target.base_model,
            session=self.session.id,
            policy_version=self.target.policy_version,
            is_live=True,
        )

    def follow(self, use: Use) -> None:
        """Until the end of the call."""
        use.follows = True
        self.followers.add(use)
        use.until_end.callback(self.followers.discard, use)


class LivePolicies:
    """Owned by the event loop. By session, until what it published last is dropped."""

    def __init__(self) -> None:
        self._policies: dict[str, LivePolicy] = {}

    def find(self, name: str) -> LivePolicy | None:
        """By the name of the live snapshot."""
        return self._policies.get(live_session(name))

    def all(self) -> list[LivePolicy]:
        return list(self._policies.values())

    def at(self, snapshot: Snapshot) -> LivePolicy | None:
        """The one that this is the target of."""
        policy = self._policies.get(snapshot.session)
        return policy if policy is not None and policy.target.name == snapshot.name else None

    def turn_to(
        self, session: Session, target: Snapshot, *, for_followers: bool
    ) -> Snapshot | None:
        """Calls that begin from now on are answered from `target`.

        Args:
            for_followers: it was published for them, and its publisher may have no other use for it.

        Returns:
            What they were answered from before, if that was for followers.
        """
        before = self._policies.get(session.id)
        if before is None:
            self._policies[session.id] = LivePolicy(
                session=session, target=target, for_followers=for_followers
            )
            return None
        old = before.target if before.for_followers else None
        before.target, before.for_followers = target, for_followers
        return old

    def forget(self, policy: LivePolicy) -> None:
        del self._policies[policy.session.id]

    def move(
        self,
        session: Session,
        target: Snapshot,
        engine_name: str,
        share: Callable[[Use], None],
    ) -> Mapping[str, str]:
        """The session's running calls go on under `target`, which `share` lets them use too. Returns notices."""
        policy = self._policies.get(session.id)
        moving = [] if policy is None else list(policy.followers)
        if not moving:
            return {}
        generator = moving[0].resource.generator
        try:
            for old in {use.engine_name for use in moving}:
                assert old is not None, "no session publishes the base model"
                generator.move(old, engine_name)
        except PostTrainingError as error:
            if error.reason is not Reason.UNIMPLEMENTED:
                raise
            return {"running samples": _CANNOT_MOVE}
        for use in moving:
            share(use)
            use.engine_name = engine_name
            use.snapshots[engine_name] = target
        return {}
