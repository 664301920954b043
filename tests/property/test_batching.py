from hypothesis import given
from hypothesis import strategies as st

from areal_core.training.batching.partition import allocate, allocate_groups, partition, shard

CAPACITY = 64
lengths = st.lists(st.integers(1, CAPACITY), max_size=80)


@given(lengths, st.integers(1, 8))
def test_every_sequence_is_in_exactly_one_microbatch_within_capacity(lengths: list[int], least: int):
    microbatches = allocate(lengths, CAPACITY, least)
    assert sorted(index for members in microbatches for index in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in members) <= CAPACITY for members in microbatches)
    assert len(microbatches) >= min(least, len(lengths))


@given(lengths)
def test_at_most_one_microbatch_is_less_than_half_full(lengths: list[int]):
    # Two of them would have been one: the second was opened although there was room in the first.
    microbatches = allocate(lengths, CAPACITY)
    assert sum(2 * sum(lengths[index] for index in members) < CAPACITY for members in microbatches) <= 1


@given(
    st.lists(st.tuples(st.integers(1, 24), st.lists(st.integers(1, 40), min_size=1, max_size=12)), max_size=12),
    st.integers(1, 8),
)
def test_groups_are_cut_within_capacity_and_only_those_that_are_too_large(
    groups: list[tuple[int, list[int]]], least: int
):
    prompts, completions = [prompt for prompt, _ in groups], [lengths for _, lengths in groups]
    microbatches = allocate_groups(prompts, completions, CAPACITY, least)
    items = [item for members in microbatches for item in members]
    assert sorted(each for item in items for each in item) == [
        (group, completion) for group, lengths in enumerate(completions) for completion in range(len(lengths))
    ]
    for members in microbatches:
        # What is computed: every item's completions, and its prompt once.
        assert 0 < sum(prompts[item[0][0]] + sum(completions[g][a] for g, a in item) for item in members) <= CAPACITY
    for group, (prompt, lengths) in enumerate(groups):
        own = [item for item in items if item[0][0] == group]
        assert all(len({g for g, _ in item}) == 1 for item in own)
        assert (len(own) == 1) == (prompt + sum(lengths) <= CAPACITY)


@given(lengths, st.integers(1, 8))
def test_groups_of_one_completion_are_cut_as_sequences_are(lengths: list[int], least: int):
    split = [(length // 2, length - length // 2) for length in lengths if length > 1]
    cut = allocate_groups([prompt for prompt, _ in split], [[completion] for _, completion in split], CAPACITY, least)
    plain = allocate([sum(each) for each in split], CAPACITY, least)
    assert [[item[0][0] for item in members] for members in cut] == plain


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 6))
def test_partition_is_complete_and_balanced(tokens: list[int], ranks: int):
    shares = partition(tokens, ranks)
    assert sorted(item for share in shares for item in share) == list(range(len(tokens)))
    loads = [sum(tokens[item] for item in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert len(tokens) < ranks or all(shares)


@given(st.data(), st.integers(1, 5), st.integers(0, 2**32), st.integers(0, 10_000))
def test_shards_cover_the_batch_once(data: st.DataObject, ranks: int, seed: int, step: int):
    tokens = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
    minibatches = data.draw(st.integers(1, len(tokens)))
    shares = shard(tokens, minibatches, ranks, seed=seed, step=step)
    assert shares == shard(tokens, minibatches, ranks, seed=seed, step=step)
    assert sorted(group for rank in shares for part in rank for group in part) == list(range(len(tokens)))
    sizes = [sum(len(rank[minibatch]) for rank in shares) for minibatch in range(minibatches)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
