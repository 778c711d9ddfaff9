"""The constants of a shelf's arbiter: each of them halved and doubled, on other traffic than that of their choice.

They were chosen with `benchmarks.shelf_simulated`. Here are two other drawings of models and traffic, each from another
hour of the trace, at rates that overload the device. A figure is the change of the share of requests within
their targets, in points, on average over the drawings. What changes by chance when events fall otherwise is shown by
wakes that are longer and shorter by a thousandth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from types import ModuleType
from unittest import mock

from benchmarks import harness
from benchmarks.fleet.shelf_models import TracedRequest
from benchmarks.fleet.shelf_simulated import CAPACITY_BYTES, make_models, make_requests, parse, read_trace, slo_share_of
from benchmarks.simulator import shelf_model
from benchmarks.simulator.shelf import ShelfSimulation
from folio.app.engine.step import step_thread
from folio.app.shelf import arbiter, arrivals, turns

CONSTANTS: dict[str, ModuleType] = {
    "HORIZON_S": arbiter,
    "_PRICE": arbiter,
    "_READ_AHEAD": arbiter,
    "_GROWTH": arbiter,
    "_MOST_GROWTH": arbiter,
    "_STEP": arbiter,
    "_USED_S": arbiter,
    "LEAST_TURN_S": turns,
    "TURN_WAKES": turns,
    "LATE_TURN_WAKES": turns,
    "DUE_SHARE": turns,
    "OVERDUE_TARGETS": turns,
    "WORKING_SHARE": turns,
    "_MEMORY": arrivals,
    "_QUANTUM_S": step_thread,
    "MOST_PRESSURE": shelf_model,
}
FACTORS = {"halved": 0.5, "doubled": 2.0}
# Seed of models and traffic, where in the trace the run begins, and the trace's mean rate, requests a second.
Drawing = tuple[int, float, float]
DRAWINGS: tuple[Drawing, ...] = ((2, 2 / 3, 3.0), (3, 1 / 2, 2.5))
SECONDS, QUICK_SECONDS = 120.0, 15.0
_CHANCE = 1e-3


def shares(
    traced: Sequence[TracedRequest], drawings: Sequence[Drawing], seconds: float, longer: float = 1.0
) -> list[float]:
    """The share of requests within their targets in each drawing, with wakes `longer` times as long."""
    found = []
    for seed, begin, rate in drawings:
        models = [replace(model, load_s=model.load_s * longer) for model in make_models(seed)]
        requests = make_requests(traced, rate, seconds, seed=seed, begin=begin)
        ShelfSimulation(models, arbiter.Arbiter(CAPACITY_BYTES)).run(requests, until_s=seconds + 60)
        found.append(slo_share_of(requests))
    return found


def main() -> None:
    args = parse(__doc__)
    traced, source = read_trace(args.trace)
    drawings, seconds = (DRAWINGS[:1], QUICK_SECONDS) if args.quick else (DRAWINGS, SECONDS)
    base = shares(traced, drawings, seconds)
    print(f"{source}: {', '.join(f'{share:.1%}' for share in base)}; changes in points:")
    raw: dict[str, list[float]] = {"as they are": base}
    figures = {"slo_share": mean(base)}

    def note(name: str, found: list[float]) -> None:
        raw[name] = found
        figures[name] = 100 * mean(share - own for share, own in zip(found, base, strict=True))
        changes = ", ".join(f"{100 * (share - own):+.1f}" for share, own in zip(found, base, strict=True))
        print(f"{name:30s}{figures[name]:+6.1f}  ({changes})", flush=True)

    for name, longer in {"chance_longer": 1 + _CHANCE, "chance_shorter": 1 - _CHANCE}.items():
        note(name, shares(traced, drawings, seconds, longer))
    for constant, module in CONSTANTS.items():
        for word, factor in FACTORS.items():
            with mock.patch.object(module, constant, getattr(module, constant) * factor):
                note(f"{constant.strip('_').lower()}_{word}", shares(traced, drawings, seconds))
    changes = [change for name, change in figures.items() if name.endswith(tuple(FACTORS))]
    figures |= {"largest_loss": -min(changes), "largest_gain": max(changes)}
    harness.finish("shelf_constants", args, figures, raw)


if __name__ == "__main__":
    main()
