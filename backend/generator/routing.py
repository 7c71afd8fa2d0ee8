"""Which of several generators a call goes to: the least loaded, or one that has read the same prefix before. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from backend.generator.base import SampleCall

BLOCK_TOKENS = 64
# Some 200 bytes each, and all together 8 million tokens of prompts.
MAX_BLOCKS = 2**17
# What is outstanding is known roughly: samples stop early. A replica with the prefix may have this much more.
_TOLERANCE = 1.25


class Router:
    """Counts what each replica has outstanding, in tokens, and remembers which prefixes each has read.

    A call goes to the replica that has read the longest part of its prompt under the same snapshot, unless it has more
    outstanding than the least loaded one by a quarter and the tokens that would not have to be read again. So the turns
    of a conversation stay together, and a prefix that everyone shares does not end up in one place.

    max_blocks: of BLOCK_TOKENS tokens, that are remembered; those that were not seen for longest are forgotten.
    """

    def __init__(self, num_replicas: int, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._loads = [0] * num_replicas
        self._num_routed = [0] * num_replicas
        self._max_blocks = max_blocks
        # By the hash of a prefix that ends with a block: bit i is set if replica i has read it. Latest seen last.
        self._readers: OrderedDict[int, int] = OrderedDict()

    @property
    def loads(self) -> Sequence[int]:
        """Tokens outstanding at each replica."""
        return self._loads

    @property
    def num_blocks(self) -> int:
        return len(self._readers)

    def choose(self, call: SampleCall, among: Iterable[int]) -> int:
        """The replica for a call, of at least one; `begin` and `end` it there."""
        candidates = sorted(among, key=lambda r: (self._loads[r], self._num_routed[r], r))
        least = self._loads[candidates[0]]
        read = self._tokens_read(call)
        near = [r for r in candidates if read[r] and self._loads[r] <= _TOLERANCE * least + read[r]]
        return max(near, key=lambda r: read[r]) if near else candidates[0]

    def begin(self, replica: int, call: SampleCall) -> None:
        self._loads[replica] += num_tokens(call)
        self._num_routed[replica] += 1
        for prefix in _prefixes(call):
            self._readers[prefix] = self._readers.pop(prefix, 0) | 1 << replica
        while len(self._readers) > self._max_blocks:
            self._readers.popitem(last=False)

    def end(self, replica: int, call: SampleCall) -> None:
        self._loads[replica] -= num_tokens(call)

    def forget(self, replica: int) -> None:
        """It has lost what it had read."""
        left = {prefix: readers & ~(1 << replica) for prefix, readers in self._readers.items()}
        self._readers = OrderedDict((p, readers) for p, readers in left.items() if readers)

    def _tokens_read(self, call: SampleCall) -> list[int]:
        """Of the prompt's first tokens, how many each replica has read."""
        read = [0] * len(self._loads)
        everyone = (1 << len(read)) - 1
        for prefix in _prefixes(call):
            everyone &= self._readers.get(prefix, 0)
            if not everyone:
                break
            for replica in range(len(read)):
                read[replica] += BLOCK_TOKENS * (everyone >> replica & 1)
        return read


def num_tokens(call: SampleCall) -> int:
    """At most, read and sampled."""
    return len(call.prompt) + call.num_samples * call.max_tokens


def _prefixes(call: SampleCall) -> Iterator[int]:
    """A hash for each whole number of the prompt's blocks. That two are equal by chance costs time, nothing else."""
    raw = call.prompt.tobytes()
    size = BLOCK_TOKENS * call.prompt.itemsize
    prefix = hash(call.snapshot)
    for stop in range(size, len(raw) + 1, size):
        prefix = hash((prefix, raw[stop - size : stop]))
        yield prefix
