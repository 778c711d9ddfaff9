"""Probes of the CUDA driver and device, one per process: `python -m benchmarks.gpu_probes NAME`.

`benchmarks.gpu_day` runs all of them. Probes record facts that explain failing tests; no fact is a failure in itself. A
probe fails only if it cannot run.

--fake runs small probes over a stand-in for the driver with host memory, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.device_time import device_timer, product_limit, read_limit
from benchmarks.facts import record as record_fact
from benchmarks.gpu_device import Device, Driver, DriverError, NoDevice, show_spread, spread

MIB = 1 << 20
CALLS = ("create", "map", "set access", "unmap", "release")


class Probes:
    """The questions, by name."""

    def __init__(self, driver: Driver, device: Device) -> None:
        self.driver, self.device = driver, device
        self.page = driver.page_bytes

    def record(self, fact: str, shown: str = "", **values: object) -> None:
        record_fact(fact, shown, **values, **({"fake": True} if self.device.fake else {}))

    # ---- the machine ----

    def machine(self) -> None:
        """Versions, clocks, and the rates that other figures are compared with."""
        versions = {name: _version(name) for name in ("torch", "triton", "cuda-bindings", "transformers", "numpy")}
        query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.total"
        try:
            argv = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
            smi = subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            smi = f"no answer from nvidia-smi ({error})"
        driver_version = self.driver.call("cuDriverGetVersion")
        self.record(
            "versions",
            f"{smi}; driver's CUDA {driver_version}, {', '.join(f'{k} {v}' for k, v in versions.items())}",
            cuda=torch.version.cuda,
            driver=driver_version,
            nvidia_smi=smi,
            query=query,
            **versions,
        )
        size, num_bytes, repeats = (256, MIB, 2) if self.device.fake else (8192, 1 << 31, 10)
        where, synchronize = self.device.where, self.device.synchronize

        def best_s(work: Callable[[], object]) -> float:
            work()
            times = []
            for _ in range(repeats):
                synchronize()
                start = time.perf_counter()
                work()
                synchronize()
                times.append(time.perf_counter() - start)
            return min(times)

        source = torch.ones(num_bytes, dtype=torch.uint8, device=where)
        target = torch.empty_like(source)
        host = torch.ones(num_bytes // 8, dtype=torch.uint8, pin_memory=not self.device.fake)
        small = torch.zeros(1, device=where)
        rates = {
            "copy_gb_per_s": 2 * num_bytes / device_timer(lambda: target.copy_(source), source.device)() / 1e9,
            "read_gb_per_s": read_limit(source.device, num_bytes)() / 1e9,
            "bf16_tflop_per_s": product_limit(source.device, torch.bfloat16, size)() / 1e12,
            "to_device_gb_per_s": len(host) / best_s(lambda: target[: len(host)].copy_(host)) / 1e9,
            "to_host_gb_per_s": len(host) / best_s(lambda: host.copy_(source[: len(host)])) / 1e9,
            "torch_launch_us": best_s(lambda: [small.add_(1) for _ in range(200)]) / 200 * 1e6,
        }
        self.record("rates", ", ".join(f"{key} {value:.4g}" for key, value in rates.items()), **rates)

    # ---- rules of the driver ----

    def granularity(self) -> None:
        """Page sizes, and the largest reservation."""
        sizes = {kind.lower(): self.driver.granularity(kind) for kind in ("MINIMUM", "RECOMMENDED")}
        self.record("granularity", ", ".join(f"{k} {v >> 10} KiB" for k, v in sizes.items()), **sizes)
        answers = {}
        for tib in (1, 8, 32, 64):
            start = time.perf_counter()
            status, address = self.driver.status("cuMemAddressReserve", tib << 40, 0, 0, 0)
            micros = (time.perf_counter() - start) * 1e6
            answers[f"{tib} TiB"] = f"{status} in {micros:.0f} us"
            if status == "CUDA_SUCCESS":
                self.driver.call("cuMemAddressFree", int(address), tib << 40)
        self.record("reservations", ", ".join(f"{k}: {v}" for k, v in answers.items()), **answers)

    def triton(self) -> None:
        """Whether Triton launches on a tensor whose first page is mapped, and on one whose first page is a hole."""
        words = self.page // 4
        answers = {}
        for base, mapped in (("mapped", 0), ("hole", 1)):
            address = self.driver.reserve(2 * self.page)
            for page in range(mapped, 2):
                self.driver.show(address + page * self.page, self.driver.create(self.page))
            data = self.device.tensor(address, 2 * self.page).view(torch.int32)
            data[mapped * words : mapped * words + 64] = 7
            pointer = self.driver.pointer_status(address)
            if (
                self.device.fake and base == "hole"
            ):  # the interpreter reads all of a tensor, and the launcher is not run
                answers[base] = f"not launched, pointer {pointer}"
                continue
            try:
                importlib.import_module("benchmarks.gpu_kernels").add_one[(1,)](data, mapped * words, 64)
                self.device.synchronize()
                right = bool((data[mapped * words : mapped * words + 64] == 8).all())
                answers[base] = f"{'right' if right else 'WRONG'}, pointer {pointer}"
            except (ValueError, RuntimeError) as error:
                answers[base] = f"refused, pointer {pointer}: {error}"
        for base, answer in answers.items():
            self.record(f"launch with a {base} base", answer, answer=answer)

    def dlpack(self) -> None:
        """Torch's operations on a tensor that begins with a hole."""
        address, page = self.driver.reserve(2 * self.page), self.page
        self.driver.show(address + page, self.driver.create(page))
        memory = self.device.tensor(address, 2 * page)
        rows = memory.view(torch.int64).view(16, -1)  # rows 8 to 15 are mapped
        places = torch.tensor([9, 15], device=self.device.where)
        operations: dict[str, Callable[[], object]] = {
            "fill": lambda: memory[page:].fill_(3),
            "sum": lambda: memory[page:].sum().item() == 3 * page,
            "index": lambda: bool((rows[places] == rows[9]).all()),
            "index_put": lambda: rows.index_copy_(0, places, rows[places] + 1),
            "to host": lambda: memory[page : page + 64].cpu().tolist(),
            "strided bfloat16": lambda: memory.view(torch.bfloat16).as_strided((2, 8), (page // 2, 1))[1].add_(1),
        }
        answers = {}
        for name, operation in operations.items():
            try:
                answers[name] = "no" if operation() is False else "yes"
                self.device.synchronize()
            except RuntimeError as error:
                answers[name] = f"no: {error}"
        self.record("tensor over a hole", ", ".join(f"{k}: {v}" for k, v in answers.items()), **answers)

    def run_unmap(self) -> None:
        """Whether one call unmaps several mappings, with and without a hole between them."""
        answers = {}
        cases: tuple[tuple[str, tuple[int, ...], int, int], ...] = (
            ("four of four", (0, 1, 2, 3), 0, 4),
            ("two of four", (0, 1, 2, 3), 1, 3),
            ("around a hole", (0, 2), 0, 3),
        )
        for name, mapped, first, last in cases:
            address = self.driver.reserve(4 * self.page)
            for i in mapped:
                self.driver.show(address + i * self.page, self.driver.create(self.page))
            at = address + first * self.page
            status, _ = self.driver.status("cuMemUnmap", at, (last - first) * self.page)
            left = [
                i for i in range(first, last) if self.driver.pointer_status(address + i * self.page) == "CUDA_SUCCESS"
            ]
            answers[name] = status + (
                f", but pages {left} are still there" if left and status == "CUDA_SUCCESS" else ""
            )
        self.record("unmap over several mappings", ", ".join(f"{k}: {v}" for k, v in answers.items()), **answers)

    def context(self) -> None:
        """Each call from a thread that has no context."""
        driver, page, answers = self.driver, self.page, dict[str, str]()

        def elsewhere(name: str, *args: Any) -> Any:
            """Make the call in a thread of its own; if it is refused there, here, because the next call needs its
            result."""
            found: list[tuple[str, Any]] = []
            thread = threading.Thread(target=lambda: found.append(driver.status(name, *args)))
            thread.start()
            thread.join()
            [(answers[name], value)] = found
            return value if answers[name] == "CUDA_SUCCESS" else driver.call(name, *args)

        address = int(elsewhere("cuMemAddressReserve", page, 0, 0, 0))
        handle = int(elsewhere("cuMemCreate", page, driver.properties, 0))
        elsewhere("cuMemMap", address, page, 0, handle, 0)
        elsewhere("cuMemSetAccess", address, page, [driver.access], 1)
        attribute = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        elsewhere("cuPointerGetAttribute", attribute, address)
        elsewhere("cuMemGetInfo")
        event = elsewhere("cuEventCreate", int(driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        elsewhere("cuEventRecord", event, 0)
        elsewhere("cuEventSynchronize", event)
        elsewhere("cuEventQuery", event)
        elsewhere("cuEventDestroy", event)
        elsewhere("cuMemUnmap", address, page)
        elsewhere("cuMemRelease", handle)
        elsewhere("cuMemAddressFree", address, page)
        need = {name: status for name, status in answers.items() if status != "CUDA_SUCCESS"}
        shown = ", ".join(f"{name} ({status})" for name, status in need.items()) or "none"
        self.record("calls that need a context", shown, **answers)

    def alias(self) -> None:
        """Write through one address and read through another in the next kernel, in both directions."""
        address, rounds = self.driver.reserve(2 * self.page), 50 if self.device.fake else 1000
        handle = self.driver.create(self.page)
        for i in range(2):
            self.driver.show(address + i * self.page, handle)
        both = self.device.tensor(address, 2 * self.page).view(torch.int32).view(2, -1)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device.where)
        for i in range(rounds):
            both[i % 2].fill_(i)
            wrong += (both[1 - i % 2] != i).sum()
        self.record(
            "aliases", f"{wrong.item()} stale words in {rounds} rounds of {self.page >> 10} KiB", stale=wrong.item()
        )

    def graph(self) -> None:
        """Replay a captured graph that reads a fixed address after another page has been mapped there: does it read the
        new page?"""
        address, answers = self.driver.reserve(self.page), {}
        handles = [self.driver.create(self.page) for _ in range(2)]
        memory = self.device.tensor(address, self.page).view(torch.int32)
        out = torch.zeros_like(memory, device=self.device.where)

        def put(i: int) -> None:
            self.driver.show(address, handles[i])

        def hide() -> None:
            self.device.synchronize()
            self.driver.call("cuMemUnmap", address, self.page)

        for name, work in (("kernel", lambda: torch.add(memory, 1, out=out)), ("copy", lambda: out.copy_(memory))):
            for i in (1, 0):
                put(i)
                memory.fill_(10 + i)
                if i:
                    hide()
            work()  # once without capture, so that torch's first-use work is not in the graph
            replay = self.device.capture(work)
            replay()
            self.device.synchronize()
            before = int(out[-1])
            hide()
            put(1)
            replay()
            self.device.synchronize()
            hide()
            plus = int(name == "kernel")
            expected = bool((out == 11 + plus).all()) and before == 10 + plus
            answers[name] = "sees the new page" if expected else f"WRONG: {before}, then {int(out[0])}"
        self.record("graph after remapping", ", ".join(f"{k} {v}" for k, v in answers.items()), **answers)

    # ---- costs ----

    def costs(self) -> None:
        """Microseconds of each call by page size and pages a run, with and without running kernels. Access is set, and
        pages are unmapped, by run; all other calls are by page."""
        sizes = [m * MIB for m in (2, 4, 8, 16, 32, 64)]
        runs: tuple[int, ...] = (1, 4, 16, 64)
        most, longest_s = 100, 0.5
        if self.device.fake:
            sizes, runs, most = [self.page, 2 * self.page], (1, 4), 3
        for size in sizes:
            for run in runs:
                for state in ("idle", "running"):
                    times = self._cost(size, run, state == "running", most, longest_s)
                    micros = {name: spread(values) for name, values in times.items()}
                    text = ", ".join(f"{name} {of['median']:.1f} (p99 {of['p99']:.1f})" for name, of in micros.items())
                    shown = f"{size // MIB} MiB x {run}, {state}, us {text}"
                    chosen = self.device.fake or (size in (2 * MIB, 16 * MIB) and run in (1, 16))
                    self.record("cost", shown if chosen else "", bytes=size, run=run, state=state, us=micros)

    def _cost(self, size: int, run: int, running: bool, most: int, longest_s: float) -> dict[str, list[float]]:
        driver, times = self.driver, {name: list[float]() for name in CALLS}
        address, end = driver.reserve(run * size), time.perf_counter() + longest_s

        def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
            start = time.perf_counter_ns()
            value = call(*args)
            times[name].append((time.perf_counter_ns() - start) / 1e3)
            return value

        for i in range(most):
            if i >= 3 and time.perf_counter() > end:
                break
            if running and not self.device.is_busy():
                self.device.busy(0.1)
            handles = [timed("create", driver.create, size) for _ in range(run)]
            for k, handle in enumerate(handles):
                timed("map", driver.map, address + k * size, handle, size)
            timed("set access", driver.allow, address, run * size)
            timed("unmap", driver.unmap, address, size, run)
            for handle in handles:
                timed("release", driver.call, "cuMemRelease", handle)
        self.device.synchronize()
        driver.call("cuMemAddressFree", address, run * size)
        return times

    def stall(self) -> None:
        """Whether mapping in one thread delays launches in another thread, delays kernels, or waits for them."""
        seconds, sizes = (0.03, (self.page,)) if self.device.fake else (0.7, (2 * MIB, 16 * MIB))
        work: dict[str, Callable[[], None]] = {"nothing": lambda: time.sleep(0.05), "Python": lambda: time.sleep(5e-5)}
        for size in sizes:
            for run in (1, 16):
                work[f"{size // MIB} MiB x {run}"] = self._remapping(size, run)
        for spin_us in (5, 50):  # launching takes longer than the first, and less than the second
            for name, beside in work.items():
                launches, gaps, rounds = self._launches_beside(beside, spin_us * 1000, seconds)
                shown = (
                    f"{spin_us} us kernels beside {name}: launch {show_spread(launches)}, gap {show_spread(gaps)} us"
                )
                self.record(
                    "launches",
                    shown,
                    spin_us=spin_us,
                    beside=name,
                    launch_us=launches,
                    gap_us=gaps,
                    rounds=rounds / seconds,
                )
        self._waits()

    def _remapping(self, size: int, run: int) -> Callable[[], None]:
        """One round of the mapper's work. The comparison with "Python" separates the driver's effect from the GIL's."""
        driver, address = self.driver, self.driver.reserve(run * size)
        handles = [driver.create(size) for _ in range(run)]

        def once() -> None:
            for i, handle in enumerate(handles):
                driver.map(address + i * size, handle, size)
            driver.allow(address, run * size)
            driver.unmap(address, size, run)

        return once

    def _launches_beside(
        self, beside: Callable[[], None], spin_ns: int, seconds: float
    ) -> tuple[dict[str, float], dict[str, float], int]:
        """Microseconds of launches, and between kernels on the device, while a thread repeats `beside`."""
        most, stop, rounds = 200 if self.device.fake else 60_000, threading.Event(), 0
        failures: list[BaseException] = []
        times = torch.zeros(most, 2, dtype=torch.int64, device=self.device.where)

        def other() -> None:
            nonlocal rounds
            try:
                self.driver.enter_thread()
                while not stop.is_set():
                    beside()
                    rounds += 1
            except DriverError as error:
                failures.append(error)

        self.device.tick(times, 0, spin_ns)  # compiles
        self.device.synchronize()
        thread, launches = threading.Thread(target=other), []
        thread.start()
        try:
            end, count = time.perf_counter_ns() + int(seconds * 1e9), 0
            while (start := time.perf_counter_ns()) < end and count < most:
                self.device.tick(times, count, spin_ns)
                launches.append((time.perf_counter_ns() - start) / 1e3)
                count += 1
        finally:
            stop.set()
            thread.join()
        self.device.synchronize()
        if failures:
            raise failures[0]
        found = times[:count].cpu()
        gaps = (found[1:, 0] - found[:-1, 1]).double() / 1e3
        return spread(launches), spread(gaps.tolist()), rounds

    def _waits(self) -> None:
        """Make each call during one long, independent kernel: is the kernel still running after the call?"""
        driver, answers = self.driver, {}
        address, state = driver.reserve(self.page), {"handle": 0}

        def create() -> None:
            state["handle"] = driver.create(self.page)

        for name, call in zip(
            CALLS,
            (
                create,
                lambda: driver.map(address, state["handle"], self.page),
                lambda: driver.allow(address, self.page),
                lambda: driver.call("cuMemUnmap", address, self.page),
                lambda: driver.call("cuMemRelease", state["handle"]),
            ),
            strict=True,
        ):
            self.device.busy(0.05, piece_s=0.05)
            start = time.perf_counter()
            call()
            micros = (time.perf_counter() - start) * 1e6
            answers[name] = f"{'does not wait' if self.device.is_busy() else 'WAITS'} ({micros:.0f} us)"
            self.device.synchronize()
        shown = ", ".join(f"{name} {answer}" for name, answer in answers.items())
        self.record("waiting for kernels", f"beside a kernel of 50 ms: {shown}", **answers)

    def ceiling_one(self) -> None:
        """The most mappings of one handle."""
        self._ceiling("one")

    def ceiling_many(self) -> None:
        """The most mappings of 4,096 handles in turn."""
        self._ceiling("many")

    def _ceiling(self, kind: str) -> None:
        driver, page = self.driver, self.page
        most, run, num_handles, longest_s = (256, 16, 8, 5.0) if self.device.fake else (600_064, 256, 4096, 20.0)
        handles = [driver.create(page) for _ in range(1 if kind == "one" else num_handles)]
        address, end = driver.reserve(most * page), time.perf_counter() + longest_s
        count, reason, rates = 0, "as many as were tried", list[float]()
        while count < most:
            start = time.perf_counter()
            if start > end:
                reason = "no time left"
                break
            first, mapped = address + count * page, 0
            status = "CUDA_SUCCESS"
            while mapped < run and status == "CUDA_SUCCESS":
                handle = handles[(count + mapped) % len(handles)]
                status, _ = driver.status("cuMemMap", first + mapped * page, page, 0, handle, 0)
                mapped += status == "CUDA_SUCCESS"
            call = "map"
            if status == "CUDA_SUCCESS":
                status, _ = driver.status("cuMemSetAccess", first, run * page, [driver.access], 1)
                call = "set access"
            if status != "CUDA_SUCCESS":
                reason = f"{call}: {status}"
                if mapped:
                    driver.unmap(first, page, mapped)
                break
            count += run
            rates.append((time.perf_counter() - start) / run * 1e6)
        tenth = max(1, len(rates) // 10)
        micros = {"first": statistics.mean(rates[:tenth] or [0.0]), "last": statistics.mean(rates[-tenth:] or [0.0])}
        self.record(
            f"ceiling of {kind}",
            f"{count} mappings of {kind} handle(s): {reason}; us a mapping {micros['first']:.1f} at first, "
            f"{micros['last']:.1f} at last",
            mappings=count,
            reason=reason,
            us=micros,
        )
        start, end = time.perf_counter(), time.perf_counter() + longest_s / 2
        left = count
        while left and time.perf_counter() < end:
            left -= run
            driver.unmap(address + left * page, page, run)
        self.record(f"unmapping {kind}", unmapped=count - left, seconds=time.perf_counter() - start)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    names = [name for name in vars(Probes) if not name.startswith("_") and name != "record"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=names)
    parser.add_argument("--fake", action="store_true")
    args = parser.parse_args()
    device = NoDevice() if args.fake else Device()  # before the driver: torch takes its context first
    getattr(Probes(Driver(), device), args.probe)()


if __name__ == "__main__":
    main()
