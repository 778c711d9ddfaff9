"""promtool's rules in Python: each fault is found, and promtool itself agrees."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.promlint import complaints

FAULTY = """
# TYPE a_nohelp gauge
a_nohelp 1
# HELP b_milliseconds X.
# TYPE b_milliseconds gauge
b_milliseconds 1
# HELP b_wait_minutes X.
# TYPE b_wait_minutes gauge
b_wait_minutes 1
# HELP c_s X.
# TYPE c_s gauge
c_s 1
# HELP c_step_us_x X.
# TYPE c_step_us_x gauge
c_step_us_x 1
# HELP d_things X.
# TYPE d_things counter
d_things 1
# HELP e_things_total X.
# TYPE e_things_total gauge
e_things_total 1
# HELP f_count X.
# TYPE f_count gauge
f_count 1
# HELP g_bucket X.
# TYPE g_bucket gauge
g_bucket{le="1"} 1
# HELP h_gauge_x X.
# TYPE h_gauge_x gauge
h_gauge_x{quantile="1"} 1
# HELP i:x X.
# TYPE i:x gauge
i:x 1
# HELP jCamel X.
# TYPE jCamel gauge
jCamel{NodeAddress="x"} 1
# HELP k_fine_total X.
# TYPE k_fine_total counter
k_fine_total{node_address="x"} 1
# HELP l_fine_seconds X.
# TYPE l_fine_seconds histogram
l_fine_seconds_bucket{le="1"} 1
l_fine_seconds_bucket{le="+Inf"} 1
l_fine_seconds_sum 1
l_fine_seconds_count 1
"""
FAULTS = {
    "a_nohelp no help text",
    'b_milliseconds use base unit "seconds" instead of "milliseconds"',
    'b_wait_minutes use base unit "seconds" instead of "minutes"',
    "c_s metric names should not contain abbreviated units",
    "c_step_us_x metric names should not contain abbreviated units",
    'd_things counter metrics should have "_total" suffix',
    'e_things_total non-counter metrics should not have "_total" suffix',
    'f_count non-histogram and non-summary metrics should not have "_count" suffix',
    'g_bucket non-histogram metrics should not have "_bucket" suffix',
    'g_bucket non-histogram metrics should not have "le" label',
    "h_gauge_x metric name should not include type 'gauge'",
    'h_gauge_x non-summary metrics should not have "quantile" label',
    "i:x metric names should not contain ':'",
    "jCamel label names should be written in 'snake_case' not 'camelCase'",
    "jCamel metric names should be written in 'snake_case' not 'camelCase'",
}


def test_each_fault_is_found_and_nothing_else() -> None:
    assert set(complaints(FAULTY)) == FAULTS


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
def test_promtool_has_the_same_complaints() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=FAULTY, capture_output=True, text=True, timeout=60)
    assert set(done.stderr.splitlines()) == FAULTS
