from hypothesis import given
from hypothesis import strategies as st

from areal_core.training.batching.partition import PromptCost, allocate, allocate_groups, partition, shard

CAPACITY = 64
lengths = st.lists(st.integers(1, CAPACITY), max_size=80)


@given(lengths)
def test_every_sequence_is_in_exactly_one_microbatch_within_capacity(lengths: list[int]):
    microbatches = allocate(lengths, CAPACITY)
    assert sorted(index for members in microbatches for index in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in members) <= CAPACITY for members in microbatches)
    # Two of them would have been one: the second was opened although there was room in the first.
    assert sum(2 * sum(lengths[index] for index in members) < CAPACITY for members in microbatches) <= 1


@given(st.lists(st.tuples(st.integers(1, 24), st.lists(st.integers(1, 40), min_size=1, max_size=12)), max_size=12))
def test_groups_are_cut_within_capacity_and_only_those_that_are_too_large(groups: list[tuple[int, list[int]]]):
    prompts, completions = [prompt for prompt, _ in groups], [lengths for _, lengths in groups]
    microbatches = allocate_groups(prompts, completions, CAPACITY)
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


def numbered(prompts: list[tuple[float, list[float]]]) -> list[PromptCost]:
    """The prompts of a group, whose sequences go round them."""
    members = [(place, prompt) for prompt, (_, its) in enumerate(prompts) for place in range(len(its))]
    numbers = {each: number for number, each in enumerate(sorted(members))}
    return [
        PromptCost(cost, its, [numbers[place, prompt] for place in range(len(its))])
        for prompt, (cost, its) in enumerate(prompts)
    ]


prompts = st.tuples(
    st.sampled_from([0.0, 1.0, 50.0, 2000.0]),
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 7.0, 300.0, 1000.0]), max_size=8),
)


@given(st.lists(prompts.map(lambda prompt: numbered([prompt])[0]), max_size=12), st.integers(1, 6))
def test_partition_is_complete_and_balanced(costs: list[PromptCost], ranks: int):
    shares = partition(costs, ranks)
    held = sorted((place, member) for share in shares for place, members in share for member in members)
    assert held == [(group, place) for group, cost in enumerate(costs) for place in range(len(cost.completions))]
    loads = [0.0] * ranks
    for rank, share in enumerate(shares):
        assert [place for place, _ in share] == sorted({place for place, _ in share})
        for place, members in share:
            own = [costs[place].completions[member] for member in members]
            loads[rank] += sum(own) + (costs[place].prompt if any(own) else 0)
    # No later than if every completion were placed alone: an equal share of all, and one more.
    everything = sum(sum(cost.completions) + cost.prompt * len(cost.completions) for cost in costs)
    largest = max((cost.prompt + max(cost.completions, default=0) for cost in costs), default=0)
    assert max(loads) <= everything / ranks + largest


@given(st.data(), st.integers(1, 5), st.integers(0, 2**32), st.integers(0, 10_000))
def test_shards_cover_the_batch_once(data: st.DataObject, ranks: int, seed: int, step: int):
    """A group's sequences may begin with several prompts."""
    groups = data.draw(st.lists(st.lists(prompts, max_size=3).map(numbered), min_size=1, max_size=12))
    minibatches = data.draw(st.integers(1, len(groups)))
    shares = shard(groups, minibatches, ranks, seed=seed, step=step)
    assert shares == shard(groups, minibatches, ranks, seed=seed, step=step)
    parts = [part for rank in shares for minibatch in rank for part in minibatch]
    held = sorted((part.group, sequence) for part in parts for sequence in part.sequences)
    assert held == [
        (group, place) for group, its in enumerate(groups) for place in range(sum(len(cost.members) for cost in its))
    ]
    whose = [{part.group for rank in shares for part in rank[minibatch]} for minibatch in range(minibatches)]
    assert sum(map(len, whose)) == len(set().union(*whose)), "a group is in one minibatch"
    [alone] = shard(groups, minibatches, 1, seed=seed, step=step)
    assert whose == [{part.group for part in minibatch} for minibatch in alone], "whatever the number of ranks"
