"""The gate's arithmetic against the paper's own form of Eq. 3."""

import math

import pytest

from areal_core.controller.core.gate import StalenessGate


@pytest.mark.parametrize("batch_size", [1, 4, 12])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_admits_exactly_what_equation_3_admits(batch_size, max_staleness):
    gate = StalenessGate(batch_size=batch_size, depth=max_staleness, steps=1000)
    for version in range(4):
        for admitted in range(12 * batch_size):
            n_r = admitted + 1
            paper = math.floor((n_r - 1) / batch_size) <= version + max_staleness
            assert gate.admits(1, admitted=admitted, version=version) == paper


def test_group_is_admitted_whole_and_only_if_a_step_will_consume_it():
    gate = StalenessGate(batch_size=8, depth=0, steps=10)
    assert gate.admits(4, admitted=4, version=0)
    assert not gate.admits(4, admitted=5, version=0)
    short = StalenessGate(batch_size=8, depth=4, steps=2)
    assert short.limit(0) == 16
    assert not short.admits(1, admitted=16, version=2)


def test_a_depth_is_a_share_of_a_batch_too_and_every_batch_becomes_complete():
    gate = StalenessGate(batch_size=8, depth=0.5, steps=10)
    assert [gate.limit(version) for version in (0, 1, 9, 10)] == [12, 20, 80, 80]
    assert [StalenessGate(batch_size=3, depth=0.5, steps=10).limit(version) for version in range(3)] == [4, 7, 10]
