"""Random use of KV memory, see `memory_machine.py`.

CI runs about 6,600 rules; `pytest --hypothesis-profile=nightly tests/vmem/test_memory_machine.py` more than 100,000.
"""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings

from tests.nightly import examples
from tests.vmem.memory_machine import MemoryMachine

MemoryMachine.TestCase.settings = settings(
    max_examples=examples(150, nightly=2400),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMemoryMachine = MemoryMachine.TestCase
