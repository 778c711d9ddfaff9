"""What the mutants of `python -m tests.mutation` change, and what they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutants import mutants_of


def changes(root: Path, code: str, seeds: int = 8) -> set[str]:
    """The changed lines of all mutants; each seed draws one for each place."""
    (root / "code.py").write_text(code)
    drawn = [m for seed in range(seeds) for _, m in mutants_of(root, "code.py", ["__repr__"], seed)]
    for mutant in drawn:
        compile(mutant.source, "code.py", "exec")
        assert mutant.original == code.splitlines()[mutant.line - 1].strip()
    return {mutant.mutated for mutant in drawn}


@pytest.mark.parametrize(
    ("code", "mutated"),
    [
        ("a < b", {"(a <= b)"}),
        ("a == b < c", {"(a != b < c)", "(a == b <= c)"}),
        ("x = é + a * b", {"x = (é - a * b)", "x = é + (a // b)"}),
        ("x += y", {"x -= y"}),
        ("a and b", {"(a or b)"}),
        ("if not a:\n    pass", {"if (not (not a)):", "if (a):"}),
        ("[a for a in b if c]", {"[a for a in b if (not (c))]"}),
        ("x = 4", {"x = (5)", "x = (3)"}),
        ("f(\n    a,\n)", {"pass"}),
        ("def f() -> bool:\n    return a", {"return (not (a))"}),
        ("def f() -> A:\n    return a", {"return None"}),
    ],
)
def test_each_operator(tmp_path: Path, code: str, mutated: set[str]) -> None:
    assert changes(tmp_path, code) == mutated


@pytest.mark.parametrize(
    "code",
    [
        "def f(a: list[1]) -> A | B: ...",
        "x: A | B",
        "logger.info('%s', 1)",
        "assert a < b",
        "raise ValueError(f'{a + 1}')",
        "'''A docstring.'''",
        "def __repr__(self):\n    return a + 1",
        "def f():\n    return None",
        "x = True",
    ],
)
def test_what_people_read_and_type_hints_stay(tmp_path: Path, code: str) -> None:
    assert changes(tmp_path, code) == set()


def test_the_function_around_a_mutant(tmp_path: Path) -> None:
    """The outermost one, as the qualified names of its code begin (`Measure.calls`); none where a class is made, or
    results are cached."""
    code = "class A:\n    x = 1\n    class B:\n        def f(self, a=2):\n            def g():\n                b < 3\n"
    code += "@cache\ndef h():\n    b < 4\n"
    (tmp_path / "code.py").write_text(code)
    functions = {m.line: m.function for _, m in mutants_of(tmp_path, "code.py", [], 1)}
    assert functions == {2: "", 4: "A.B.f", 6: "A.B.f", 9: ""}


def test_a_sample_stays_when_lines_move(tmp_path: Path) -> None:
    """The key that a sample is drawn by does not depend on what else is in the file; equal lines differ."""

    def keys(code: str) -> list[bytes]:
        (tmp_path / "code.py").write_text(code)
        return [key for key, _ in mutants_of(tmp_path, "code.py", [], 1)]

    before = keys("a < b\na < b\n")
    assert len(set(before)) == 2
    assert keys("# more\na < b\nf\na < b\n") == before
