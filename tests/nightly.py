"""How much is tried: few examples each time, and some of the expensive cases each day; many, and all of them, with
`pytest --hypothesis-profile=nightly`.

Hypothesis picks a profile of its own, "ci", where the environment says `CI`; for the tests it is like the default one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TypeVar

from hypothesis import settings

Case = TypeVar("Case")


def examples(usual: int, nightly: int) -> int:
    return nightly if settings.get_current_profile_name() == "nightly" else usual


def of_today(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases, the next ones each day. All of them nightly."""
    first = date.today().toordinal() * count
    return [cases[(first + i) % len(cases)] for i in range(examples(count, nightly=len(cases)))]
