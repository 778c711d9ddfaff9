"""Roles of replicas, and the order in which requests get them."""

from __future__ import annotations

import random

import pytest

from folio.app.fleet.fleet import RoutedRequest
from folio.app.fleet.policies import make_policy
from folio.app.fleet.roles import ByRole, Roles
from tests.app.fleet.reports import UNIT, fleet_with, keys_of, report

NAMES = ["a", "b", "c", "d"]


def roles_of(share: float, names: list[str] = NAMES) -> Roles:
    roles = Roles(share)
    roles.update(names)
    return roles


@pytest.mark.parametrize(
    ("share", "num_replicas", "num_prefill"),
    [(0.0, 4, 0), (0.5, 0, 0), (0.5, 1, 0), (0.1, 2, 1), (0.9, 2, 1), (0.25, 4, 1), (0.5, 5, 2), (0.99, 4, 3)],
)
def test_both_roles_have_a_replica_from_two_on(share: float, num_replicas: int, num_prefill: int) -> None:
    names = [f"r{i}" for i in range(num_replicas)]
    roles = roles_of(share, random.Random(0).sample(names, num_replicas))
    assert roles.prefill == frozenset(names[:num_prefill])


def test_requests_go_to_their_role_first_and_to_all_others_last() -> None:
    fleet = fleet_with(*NAMES)
    policy = ByRole(make_policy("prefix_aware", fleet), fleet, roles_of(0.5), 0)
    new = RoutedRequest("new", 10 * UNIT, keys_of(1, 10))
    begun = RoutedRequest("begun", 10 * UNIT, keys_of(1, 10), is_begun=True)
    for request, first in ((new, {"a", "b"}), (begun, {"c", "d"})):
        ranked = policy.rank_replicas(request, NAMES, 0.5)
        assert set(ranked[:2]) == first
        assert sorted(ranked) == NAMES
        assert sorted(policy.rank_replicas(request, ["a", "b"], 0.5)) == ["a", "b"]
        assert policy.rank_replicas(request, ["d"], 0.5) == ["d"]


def test_prompts_of_which_a_decode_replica_lacks_little_go_there() -> None:
    fleet = fleet_with(*NAMES)
    fleet.apply_report("d", report(1.0, keys_of(1, 9)), 1.0)
    policy = ByRole(make_policy("prefix_aware", fleet), fleet, roles_of(0.5), 2 * UNIT)
    for num_units, first in ((10, "d"), (12, "a b")):
        request = RoutedRequest("new", num_units * UNIT, keys_of(1, num_units))
        assert policy.rank_replicas(request, NAMES, 1.0)[0] in first
