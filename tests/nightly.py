"""How much is tried: few examples each time, and many with `pytest --hypothesis-profile=nightly`.

Hypothesis picks a profile of its own, "ci", where the environment says `CI`; for the tests it is like the default one.
"""

from __future__ import annotations

import importlib.util


def examples(usual: int, nightly: int) -> int:
    if not importlib.util.find_spec("hypothesis"):  # not on every GPU machine
        return usual
    from hypothesis import settings

    return nightly if settings.get_current_profile_name() == "nightly" else usual
