"""Several replicas on one GPU, and each way of using a model once (jobs of `benchmarks.gpu_day`).

--measure replicas: 1, 2 and again 1 replicas with half a GPU each and shared KV memory, under load. Five times a second
the budgets are read: their sum must never exceed the shared amount. After the load idle memory, and after the second
replica its weights, must be free by nvidia-smi.

--measure features: a small float32 model on the CPU and then on the GPU: plain, with a LoRA adapter, a draft model,
embeddings, an 8-bit KV cache, 8-bit weights, and preempted by swap and by recompute, whose tokens must be those of an
undisturbed run. Where tokens cannot be the CPU's, the fact says so.

Each part is limited in time and fails alone. --fake is small and on the CPU, and measures nothing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.facts import record
from benchmarks.gpu.clients import Clients, Level, summarise
from benchmarks.gpu.parts import NO_RAY, Parts, arguments, gpu_memory_bytes, record_gpu

if TYPE_CHECKING:
    from folio.app.engine import LLM, SamplingParams

LIMITS_S = {"replicas": 115.0, "features": 85.0}
MODEL = "llama"
SHARED_BYTES, FAKE_SHARED_BYTES = 24 << 30, 128 << 20
WEIGHT_BYTES = 16_060_522_496  # of Llama-3-8B in bfloat16
WATCH_S, DEPLOY_S, RELEASE_S = 0.2, 70.0, 25.0
# Idle pages and cached prefixes go back after so long.
IDLE = {"kv_idle_release_s": 1.0, "prefix_cache_release_s": 2.0}
# Shares of the bytes that the engine has released, and of a replica's weights, that nvidia-smi must show.
SEEN_SHARE = 0.9
LOADS = {"one replica": (32, 64), "two replicas": (64, 192), "while one of two stops": (32, 64)}
NUM_PROMPTS, NEW_TOKENS = 8, 24
PRESSED_SHARE = 0.5  # of the memory that an undisturbed run takes
EMBEDDING_TOLERANCE = 1e-4


class BudgetWatch(threading.Thread):
    """Reads the replicas' KV memory over HTTP until it is stopped.

    Attributes:
        most_budget_bytes, most_physical_bytes: largest sums over the replicas.
        rows: (budget, physical bytes) of each replica, of the last reading.
        num_readings, num_silent: answers with figures of all replicas, and without.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._over = f"{url}/v1/load", threading.Event()
        self.most_budget_bytes = self.most_physical_bytes = self.num_readings = self.num_silent = 0
        self.rows: list[tuple[int, int]] = []

    def run(self) -> None:
        while not self._over.wait(WATCH_S):
            try:
                with urllib.request.urlopen(self._url, timeout=5.0) as answer:
                    replicas = json.loads(answer.read())["replicas"]
            except (OSError, HTTPException, ValueError):
                self.num_silent += 1
                continue
            self.rows = [(replica["budget_bytes"], replica["physical_bytes"]) for replica in replicas]
            self.num_readings += 1
            self.most_budget_bytes = max(self.most_budget_bytes, sum(budget for budget, _ in self.rows))
            self.most_physical_bytes = max(self.most_physical_bytes, self.physical_bytes)

    @property
    def physical_bytes(self) -> int:
        return sum(physical for _, physical in self.rows)

    def stop(self) -> None:
        self._over.set()
        self.join()


class Replicas:
    """The parts of --measure replicas."""

    def __init__(self, served: Any, clients: Clients, watch: BudgetWatch, tokens: tuple[int, int], fake: bool) -> None:
        self._served, self._clients, self._watch, self._fake = served, clients, watch, fake
        self._tokens = tokens
        self._actor = {"num_cpus": 0.25, "num_gpus": 0.0 if fake else 0.5}

    def deploy(self, count: int) -> None:
        start = time.monotonic()
        self._served.deploy(DEPLOY_S * (1 + self._fake), num_replicas=count, ray_actor_options=self._actor)
        self._served.wait_until(lambda: self._served.num_running == count, DEPLOY_S)
        record(f"{count} replicas", f"after {time.monotonic() - start:.1f} s", seconds=time.monotonic() - start)
        record_gpu(f"{count} replicas")

    def load(self, name: str) -> None:
        at_once, count = LOADS[name]
        level = Level(2, 8, 32, 8, 60) if self._fake else Level(at_once, count, 1024, 64, 30)
        records, seconds, busy = self._clients.run(level, level.asks(*self._tokens))
        summarise(f"load, {name}", records, seconds, busiest_client=round(busy, 2), rows=self._watch.rows)

    def release(self) -> None:
        """Wait until idle memory has gone back, and compare with nvidia-smi."""
        before, physical = gpu_memory_bytes(), self._watch.most_physical_bytes
        start = time.monotonic()
        while self._watch.physical_bytes > 0.02 * physical:
            if time.monotonic() - start > RELEASE_S:
                raise RuntimeError(f"{self._watch.physical_bytes} bytes are left of {physical} at most")
            time.sleep(WATCH_S)
        after = gpu_memory_bytes()
        seen = "no nvidia-smi" if before is None or after is None else f"{(before - after) / 2**30:.2f} GiB"
        record(
            "idle release",
            f"{physical / 2**30:.2f} GiB at most, nearly none {time.monotonic() - start:.1f} s later; since then "
            f"nvidia-smi: {seen} less",
            physical_bytes=physical,
            left_bytes=self._watch.physical_bytes,
            nvidia_smi_bytes=[before, after],
        )

    def stop_one(self) -> None:
        """Scale down beside requests: all complete, and the replica's memory is free."""
        before, failed = gpu_memory_bytes(), list[Exception]()

        def load() -> None:
            try:
                self.load("while one of two stops")
            except Exception as error:  # noqa: BLE001 - raised below, in the part's thread
                failed.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        self.deploy(1)
        thread.join()
        deadline, after = time.monotonic() + RELEASE_S, gpu_memory_bytes()
        while before is not None and after is not None and before - after < SEEN_SHARE * WEIGHT_BYTES:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nvidia-smi: {before} bytes with two replicas, {after} with one")
            time.sleep(WATCH_S)
            after = gpu_memory_bytes()
        freed = "no nvidia-smi" if before is None or after is None else f"{(before - after) / 2**30:.1f} GiB"
        record("freed by the second replica", freed, nvidia_smi_bytes=[before, after])
        for error in failed:
            raise error

    def budgets(self, shared_bytes: int) -> None:
        watch = self._watch
        record(
            "budgets",
            f"{watch.most_budget_bytes / 2**30:.2f} GiB at most in {watch.num_readings} readings, of "
            f"{shared_bytes / 2**30:.2f} shared; physical {watch.most_physical_bytes / 2**30:.2f} at most",
            most_budget_bytes=watch.most_budget_bytes,
            most_physical_bytes=watch.most_physical_bytes,
            shared_bytes=shared_bytes,
            readings=watch.num_readings,
            silent=watch.num_silent,
            rows=watch.rows,
        )
        most = max(watch.most_budget_bytes, watch.most_physical_bytes)
        if most > shared_bytes or watch.num_readings < 10:
            raise RuntimeError(f"{most} bytes at most of {shared_bytes}, in {watch.num_readings} readings")


def measure_replicas(parts: Parts, folder: Path, fake: bool) -> None:
    from benchmarks.gpu import models as gpu_models
    from benchmarks.served import Served, cluster

    vocab_size = gpu_models.write_model(folder, "tiny" if fake else "llama-3-8b")
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256} if fake else {}
    engine = {"model": str(folder), "load_format": "dummy", "device": "cpu" if fake else "cuda", "max_model_len": 2048}
    shared_bytes = FAKE_SHARED_BYTES if fake else SHARED_BYTES
    args = {
        "engine": engine | IDLE | sizes,
        "model_name": MODEL,
        "shared_kv_memory_bytes": shared_bytes,
        "routing": {"policy": "least_loaded"},
    }
    record_gpu("before")
    # Given, so that it holds also where Ray finds no GPU.
    with cluster(num_cpus=8, num_gpus=0 if fake else 1) as url:
        watch, clients = BudgetWatch(url), Clients(url, MODEL, 64)
        replicas = Replicas(Served("folio", url, args), clients, watch, (gpu_models.FIRST_WORD, vocab_size), fake)
        try:
            if parts.run("1 replica", lambda: replicas.deploy(1)):
                watch.start()
                parts.run("one replica", lambda: replicas.load("one replica"))
                if parts.run("2 replicas", lambda: replicas.deploy(2), at_least_s=20):
                    parts.run("two replicas", lambda: replicas.load("two replicas"))
                    parts.run("idle release", replicas.release)
                    parts.run("1 replica again", replicas.stop_one, at_least_s=10)
                parts.run("budgets", lambda: replicas.budgets(shared_bytes), at_least_s=0)
        finally:
            clients.close()
            if watch.is_alive():
                watch.stop()
    record_gpu("after")


# ---- features ----


def greedy(new_tokens: int) -> SamplingParams:
    from folio.app.engine import SamplingParams

    return SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)


def generate(llm: LLM, prompts: list[list[int]], new_tokens: int, **options: Any) -> list[list[int]]:
    return [list(done.token_ids) for done in llm.generate(prompts, greedy(new_tokens), **options)]


def make_prompts(shortest: int = 20, longer_by: int = 25) -> list[list[int]]:
    return [[100 + (7 * i + 13 * j * j) % 1800 for j in range(shortest + longer_by * i)] for i in range(NUM_PROMPTS)]


class Features:
    """The parts of --measure features: each is an engine on the CPU, one on the GPU, and what must be equal."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch

        from benchmarks.gpu import models as gpu_models

        self._folder, self._device = folder, device
        small: dict[str, Any] = {"dtype": torch.float32, "weights": True}
        gpu_models.write_model(folder / "model", "tiny", **small)
        gpu_models.write_model(folder / "draft", "tiny", num_hidden_layers=1, **small)
        self._write_adapter(torch)
        self._plain = self._tokens("cpu")

    def _write_adapter(self, torch: Any) -> None:
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM

        model, generator = (
            AutoModelForCausalLM.from_pretrained(self._folder / "model"),
            torch.Generator().manual_seed(0),
        )
        tensors = {}
        for path, module in model.named_modules():
            if path.endswith(("q_proj", "v_proj", "down_proj")):
                rows, columns = module.weight.shape
                tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(4, columns, generator=generator) / 4
                tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) / 4
        folder = self._folder / "adapter"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 8}
        fixed = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "use_dora": False}
        (folder / "adapter_config.json").write_text(json.dumps(targets | fixed | {"modules_to_save": None}))

    def _engine(self, device: str, **settings: Any) -> LLM:
        from folio.app.engine import LLM

        fixed = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, "skip_tokenizer_init": True}
        return LLM(self._folder / "model", device=device, **({"kv_memory_bytes": 256 << 20} | fixed | settings))

    def _tokens(self, device: str, options: dict[str, Any] | None = None, **settings: Any) -> list[list[int]]:
        with self._engine(device, **settings) as llm:
            tokens = generate(llm, make_prompts(), NEW_TOKENS, **(options or {}))
            llm.engine.check_integrity()
            return tokens

    def _compare(self, name: str, expected: list[list[int]], found: list[list[int]], *, exact: str = "") -> None:
        """Record how many tokens are equal; all must be, unless `exact` says why they cannot."""
        equal = sum(a == b for one, two in zip(expected, found, strict=True) for a, b in zip(one, two, strict=True))
        count = sum(map(len, expected))
        firsts = sum(one[0] == two[0] for one, two in zip(expected, found, strict=True))
        shown = f"{equal} of {count} tokens as expected{'; ' + exact if exact else ''}"
        record(name, shown, equal=equal, tokens=count, equal_firsts=firsts, expected=expected, found=found)
        if equal < count and not (exact and firsts > len(expected) / 2):
            raise RuntimeError(shown)

    def plain(self) -> None:
        self._compare("tokens as on the CPU", self._plain, self._tokens(self._device))

    def adapter(self) -> None:
        settings: dict[str, Any] = {"adapters": {"style": str(self._folder / "adapter")}}
        expected = self._tokens("cpu", {"adapter": "style"}, **settings)
        if expected == self._plain:
            raise RuntimeError("the adapter changes nothing")
        self._compare("LoRA, as on the CPU", expected, self._tokens(self._device, {"adapter": "style"}, **settings))

    def draft_model(self) -> None:
        settings: dict[str, Any] = {"speculation": "draft", "draft_model": str(self._folder / "draft")}
        self._compare("draft model, as without", self._plain, self._tokens(self._device, **settings))

    def embeddings(self) -> None:
        vectors = []
        for device in ("cpu", self._device):
            with self._engine(device, pooling="last") as llm:
                vectors.append(llm.embed(make_prompts()))
        off = max(abs(a - b) for one, two in zip(*vectors, strict=True) for a, b in zip(one, two, strict=True))
        length = math.sqrt(sum(value * value for value in vectors[1][0]))
        record("embeddings", f"components differ from the CPU's by {off:.1e} at most", off=off, length=length)
        if not (off <= EMBEDDING_TOLERANCE and abs(length - 1) < 1e-3):
            raise RuntimeError(f"components differ by {off}, above {EMBEDDING_TOLERANCE}; length {length}")

    def fp8_cache(self) -> None:
        tokens = [self._tokens(device, kv_dtype="fp8_e4m3") for device in ("cpu", self._device)]
        why = "not exact: sums in another order round to other 8-bit floats"
        self._compare("fp8 KV cache, as on the CPU", *tokens, exact=why)

    def int8_weights(self) -> None:
        from folio.app.errors import ConfigError

        expected = self._tokens("cpu", quantization="int8")
        try:
            found = self._tokens(self._device, quantization="int8")
        except ConfigError as error:
            record("int8 weights", f"on the CPU only: {error}")
            return
        why = "not exact: int8 products of another device round otherwise"
        self._compare("int8 weights, as on the CPU", expected, found, exact="" if self._device == "cpu" else why)

    def preemption(self) -> None:
        """With half of the memory that an undisturbed run takes, and each way to come back."""
        blocks = 16 if self._device == "cpu" else 64  # several for each sequence, so that it outgrows its memory
        prompts, new_tokens = make_prompts(8, 1), 4 * blocks
        alone = {"prefix_cache": False, "kv_idle_release_s": 600.0, "block_tokens": blocks}
        alone["max_model_len"] = len(prompts[-1]) + new_tokens
        with self._engine(self._device, **alone) as llm:
            peak = 0
            for i, prompt in enumerate(prompts):
                llm.engine.submit(str(i), prompt, greedy(new_tokens))
            while llm.engine.has_work:
                llm.engine.step()
                peak = max(peak, llm.engine.report().active_bytes)
            expected = generate(llm, prompts, new_tokens)
        budget = int(PRESSED_SHARE * peak)
        for way in ("swap", "recompute"):
            with self._engine(self._device, **(alone | {"preemption": way, "kv_memory_bytes": budget})) as llm:
                found = generate(llm, prompts, new_tokens)
                counts = {str(key): count for key, count in llm.engine.scheduler.begun.num_preempted.items()}
                llm.engine.check_integrity()
            record(f"preempted by {way}", f"{counts}, in {budget >> 10} KiB", counts=counts, budget_bytes=budget)
            self._compare(f"{way}, as undisturbed", expected, found)
            if not counts.get(way):
                raise RuntimeError(f"nothing was preempted by {way}: {counts}")


FEATURES = ("plain", "preemption", "adapter", "draft_model", "embeddings", "fp8_cache", "int8_weights")


def measure_features(parts: Parts, folder: Path, fake: bool) -> None:
    from folio.kernels import KernelError
    from folio.kernels.cpu.build import compile_all

    with suppress(KernelError):  # without a compiler, torch computes
        compile_all()
    features = Features(folder, "cpu" if fake else "cuda")
    for name in FEATURES:
        start = time.monotonic()
        part: Callable[[], None] = getattr(features, name)
        parts.run(name.replace("_", " "), part)
        record(f"{name}, seconds", seconds=round(time.monotonic() - start, 1))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--measure", choices=tuple(LIMITS_S), required=True)
    args = parser.parse_args()
    if args.measure == "replicas" and importlib.util.find_spec("ray") is None:
        sys.exit(NO_RAY)
    parts, measure = Parts(LIMITS_S[args.measure] * (1 + args.fake)), globals()[f"measure_{args.measure}"]
    with tempfile.TemporaryDirectory() as folder:
        parts.run(args.measure, lambda: measure(parts, Path(folder), args.fake))
    parts.finish()


if __name__ == "__main__":
    main()
