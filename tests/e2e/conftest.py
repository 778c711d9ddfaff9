"""An application on the tests' Ray cluster (`cluster_url`). A start takes 10 to 20 s."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster import Front, shared_args


@pytest.fixture(scope="module")
def folio(front: Front) -> Any:
    """A handle of the ingress of the application that several files share, at `/`."""
    return front.run(shared_args())
