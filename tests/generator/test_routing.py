"""Which replica a call goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.generator.base import SampleCall
from backend.generator.routing import BLOCK_TOKENS, Router, num_tokens
from tests.generator.calls import call, random_prompt

NUM_REPLICAS = 3
CALLS = st.builds(
    lambda prompt, num_tokens, snapshot, max_tokens: call(
        random_prompt(num_tokens, seed=prompt), max_tokens=max_tokens, snapshot=snapshot
    ),
    prompt=st.integers(0, 2),
    num_tokens=st.integers(1, 5 * BLOCK_TOKENS),
    snapshot=st.sampled_from([None, "a", "b"]),
    max_tokens=st.integers(0, 200),
)
AMONG = st.sets(st.integers(0, NUM_REPLICAS - 1), min_size=1)


def long(num_blocks: int, *, seed: int = 0, **options) -> SampleCall:
    prompt = random_prompt(num_blocks * BLOCK_TOKENS, seed=seed)
    return call(prompt, max_tokens=10, **options)


@given(st.lists(st.tuples(CALLS, AMONG, st.booleans()), max_size=40))
def test_call_goes_where_it_may_and_no_further_above_the_least_than_it_saves(actions):
    router = Router(NUM_REPLICAS, max_blocks=8)
    running: list[tuple[int, SampleCall]] = []
    for asked, among, ends in actions:
        replica = router.choose(asked, among)
        assert replica in among
        least = min(router.loads[r] for r in among)
        assert router.loads[replica] <= 1.25 * least + len(asked.prompt)
        router.begin(replica, asked)
        running.append((replica, asked))
        if ends:
            router.end(*running.pop(0))
        for r in range(NUM_REPLICAS):
            assert router.loads[r] == sum(num_tokens(c) for on, c in running if on == r)
        assert router.num_blocks <= 8
    for replica, asked in running:
        router.end(replica, asked)
    assert list(router.loads) == [0] * NUM_REPLICAS


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_calls_that_share_nothing_go_to_the_least_loaded(sizes):
    router = Router(NUM_REPLICAS)
    for i, max_tokens in enumerate(sizes):
        asked = call(random_prompt(BLOCK_TOKENS, seed=i), max_tokens=max_tokens)
        replica = router.choose(asked, range(NUM_REPLICAS))
        assert router.loads[replica] == min(router.loads)
        router.begin(replica, asked)


def test_idle_replicas_take_turns():
    router = Router(NUM_REPLICAS)
    chosen = []
    for i in range(6):
        asked = call([i], max_tokens=5)
        chosen.append(router.choose(asked, range(NUM_REPLICAS)))
        router.begin(chosen[-1], asked)
        router.end(chosen[-1], asked)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_turns_of_a_conversation_stay_together():
    router = Router(2)
    for turn in range(1, 6):
        for conversation in range(4):
            asked = long(turn, seed=conversation)
            replica = router.choose(asked, range(2))
            if turn > 1:
                assert replica == conversation % 2
            router.begin(replica, asked)
        for conversation in range(4):
            router.end(conversation % 2, long(turn, seed=conversation))


def test_longest_prefix_decides():
    router = Router(2)
    router.begin(0, long(1))
    router.begin(1, long(3))
    router.end(0, long(1))
    router.end(1, long(3))
    assert router.choose(long(4), range(2)) == 1


def test_prefix_read_under_another_snapshot_counts_for_nothing():
    router = Router(2)
    for snapshot in ("a", None):
        router.begin(0, long(2, snapshot=snapshot))
    assert router.choose(long(2, snapshot="b"), range(2)) == 1


def test_prefix_that_everyone_shares_is_spread_once_its_reader_has_much_more_to_do():
    router = Router(2)
    counts = [0, 0]
    for _ in range(100):
        replica = router.choose(long(2), range(2))
        router.begin(replica, long(2))
        counts[replica] += 1
    assert counts[0] + counts[1] == 100
    assert max(counts) <= 1.3 * min(counts)


def test_prefixes_that_were_not_seen_for_long_are_forgotten():
    router = Router(2, max_blocks=4)
    router.begin(0, long(2, seed=1))
    router.end(0, long(2, seed=1))
    for seed in range(2, 5):
        router.begin(1, long(2, seed=seed))
        router.end(1, long(2, seed=seed))
    assert router.num_blocks == 4
    assert router.choose(long(2, seed=1), range(2)) == 0, "by turns: it is not known any more"
    assert router.choose(long(2, seed=4), range(2)) == 1


def test_replica_that_lost_its_cache_is_not_preferred_any_more():
    router = Router(2)
    router.begin(0, long(2))
    router.begin(1, long(1, seed=9))
    router.forget(0)
    assert router.choose(long(2), range(2)) == 1
    assert router.num_blocks == 1
