"""Start-up of an engine: warm-up requests, and the prefixes of peer replicas.

Kernels, product plans, threads, grammar compilers, pages and mappings are compiled or allocated at first use. Warm-up
requests of random tokens spend that time before a client has to wait for it: decodes of several batch sizes, greedy and
sampled, and prompts that fill a step. They run in the thread that will call `step`, because OpenMP threads belong to
it. On a device whose kernels compile at their first use, a step of each kind runs before (`execution/variants.py`), and
a request with each way of sampling; decode graphs are captured.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from folio.app.engine.engine import Engine
from folio.app.engine.memory.kv_store import WARM_UP_KEYS
from folio.app.engine.ranks.variants import run_variants
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.request.faults import kernel_errors_as_config_errors
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.request.prefix_keys import adapter_of
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.errors import RequestError, UnavailableError
from folio.vmem import CachedPrefix, IntegrityError

logger = logging.getLogger(__name__)

# Rounds run a second time, for at most about this long, to measure steps without first-use costs.
_MEASURING_S = 1.0
# On a CPU, whose kernels have hardly any first-use costs that depend on a step's size, no round takes much longer: the
# first time, and when it is measured.
_LONG_FIRST_ROUND_S, _LONG_ROUND_S = 0.3, 1.0
_PROMPT_TOKENS, _NEW_TOKENS = 8, 2
# Most hot prefixes that an engine reports to a peer replica, and their tokens: a megabyte.
_MOST_HOT_PREFIXES, _MOST_HOT_TOKENS = 256, 1 << 17

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=0,
    logprobs=1,
    ignore_eos=True,
)
# The pattern matches any text, because a tokenizer may have no token of lower-case letters alone.
STRUCTURED = SamplingParams(structure=Structure("regex", r"[\s\S]{1,20}"), stop=["\n\n"], seed=0)
# One way of sampling each.
SAMPLER_VARIANTS = tuple(
    SamplingParams(seed=0, ignore_eos=True, **only)
    for only in (
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.01},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {0: 1.0}},
        {"min_tokens": 2},
        {"allowed_token_ids": [0, 1]},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
    )
)

Prompt = tuple[list[int], SamplingParams]
# Fingerprint → the `hot_prefixes` of each peer engine that has it.
PeerPrefixes = Callable[[str], Sequence[Sequence[CachedPrefix]]]


@dataclass(frozen=True, slots=True)
class WarmedPrefixes:
    """Numbers of prefixes that `warm_prefixes` computed, could not compute, and had no time for."""

    pinned: int = 0
    hot: int = 0
    failed: int = 0
    late: int = 0

    def __str__(self) -> str:
        return f"warmed {self.pinned} pinned and {self.hot} hot prefixes; {self.failed} failed, {self.late} out of time"


def get_ready(engine: Engine, prefixes_of_others: PeerPrefixes | None) -> None:
    """Warm up, and compute the prefixes of peer engines, as the settings ask."""
    config, times = engine.config, engine.start_times
    logger.info("model %s is loaded (%.1f s)", config.model, times.ready_s)
    if config.warm_up:
        warm_up(engine)
        logger.info("model %s is warmed up (%.1f s)", config.model, times.warm_up_s)
    if prefixes_of_others is not None and config.prefix_cache and config.restore_prefixes_s:
        reports = prefixes_of_others(engine.fingerprints().prefixes)
        if any(reports):
            logger.info("%s", warm_prefixes(engine, reports, config.restore_prefixes_s))
        times.lap("prefixes_s")


def warm_up(engine: Engine) -> None:
    """Run the warm-up requests, in the thread that will call `step`. Only measured step times, and graphs, remain.

    Raises:
        ConfigError: a configured kernel cannot serve this model.
        ModelError: decode graphs are required, and the model cannot be captured.
    """
    rounds = warm_up_rounds(
        vocab_size=engine.model.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.scheduler.max_num_seqs,
        step_tokens=engine.config.max_num_batched_tokens,
        has_structures=engine.vocabulary.has_structures,
        fits=lambda lengths: sum(map(engine.memory.pages_for, lengths)) <= engine.memory.num_free_pages,
    )
    is_cpu = engine.model.module.device.type == "cpu"
    with kernel_errors_as_config_errors():
        engine.executor.capture_graphs(engine.config.kv_view)
        if not is_cpu:
            warm_up_variants(engine)
        _run_rounds(engine, rounds, long_s=_LONG_FIRST_ROUND_S if is_cpu else math.inf)
        engine.recovery.forget_steps()
        _run_rounds(engine, rounds, long_s=_LONG_ROUND_S if is_cpu else math.inf, limit_s=_MEASURING_S)
    engine.reset_counts()
    engine.start_times.lap("warm_up_s")


def warm_up_variants(engine: Engine) -> None:
    """Run everything that compiles kernels: each kind of step, and each way of sampling."""
    scheduler, config = engine.scheduler, engine.config
    run_variants(
        engine.executor,
        engine.memory,
        config.kv_view,
        max_num_seqs=scheduler.max_num_seqs,
        step_tokens=config.max_num_batched_tokens,
    )
    if engine.model.generates and engine.max_model_len > _NEW_TOKENS:
        prompt = [0] * min(_PROMPT_TOKENS, engine.max_model_len - _NEW_TOKENS)
        for params in SAMPLER_VARIANTS:
            _run(engine, [(prompt, replace(params, max_tokens=_NEW_TOKENS))])


def _run_rounds(engine: Engine, rounds: Sequence[list[Prompt]], *, long_s: float, limit_s: float = math.inf) -> None:
    """Run rounds, most with more tokens than the one before, until a limit, or one that is expected to take longer than
    `long_s`."""
    token_s, most_tokens = 0.0, 0
    ends_at = time.monotonic() + limit_s
    for prompts in rounds:
        num_tokens = sum(len(token_ids) + (params.max_tokens or 0) for token_ids, params in prompts)
        began = time.monotonic()
        if began > ends_at or (num_tokens > most_tokens and token_s * num_tokens > long_s):
            break
        _run(engine, prompts)
        token_s, most_tokens = (time.monotonic() - began) / num_tokens, num_tokens


def _run(engine: Engine, prompts: Sequence[Prompt]) -> None:
    for i, (token_ids, params) in enumerate(prompts):
        _add(engine, f"warm-up {i}", token_ids, params, WARM_UP_KEYS)
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:  # a model may fail on random tokens and serve requests well
                logger.warning("%s: %s", delta.request_id, delta.error)
        if engine.starved:  # on a shared device, without the memory that it may have later
            logger.info("%d warm-up requests are skipped: too little memory now", len(engine.requests))
            engine.cancel_all()
    engine.memory.prefixes.evict_prefixes(WARM_UP_KEYS)  # the second time is no shorter than the first


def warm_up_rounds(
    *,
    vocab_size: int,
    max_model_len: int,
    max_num_seqs: int,
    step_tokens: int,
    has_structures: bool,
    fits: Callable[[Sequence[int]], bool],
) -> list[list[Prompt]]:
    """Rounds of warm-up requests: 1, 4, 16, … sequences, then a whole step of prompts.

    Args:
        max_model_len: longest prompt plus output, in tokens.
        max_num_seqs: most sequences that run at once.
        step_tokens: most tokens of a step.
        has_structures: whether outputs may have a structure.
        fits: whether sequences of these lengths can run at once.
    """
    new_tokens = min(_NEW_TOKENS, max_model_len - 1)
    longest = max_model_len - new_tokens
    short = min(_PROMPT_TOKENS, longest)
    whole_step = [longest] * (step_tokens // longest) + [n for n in [step_tokens % longest] if n]
    rounds = [[(short, params)] for params in (SAMPLED, *((STRUCTURED,) if has_structures else ()))]
    counts = [4**i for i in range(max_num_seqs.bit_length()) if 4**i < max_num_seqs] + [max_num_seqs]
    rounds += [[(short, (GREEDY, SAMPLED)[i % 2]) for i in range(count)] for count in counts]
    rounds += [[(n, GREEDY) for n in whole_step[:max_num_seqs]]]
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[Prompt]] = []
    for lengths in rounds:
        while len(lengths) > 1 and not fits([n + new_tokens for n, _ in lengths]):
            lengths = lengths[: len(lengths) // 2]
        prompts.append(
            [
                (torch.randint(vocab_size, (n,), generator=generator).tolist(), replace(params, max_tokens=new_tokens))
                for n, params in lengths
            ]
        )
    return prompts


def hot_prefixes(engine: Engine) -> list[CachedPrefix]:
    """Prefixes for a new peer replica: those that clients have pinned, and those hit most. From any thread."""
    configured = engine.config.pinned_prompts.keys() | engine.config.pinned_system_prompts.keys()
    pinned = [prefix for prefix in engine.pinned_prefixes() if prefix.pin_name not in configured]
    held_at = "" if engine.handover is None else engine.handover.address()
    hot = engine.memory.prefixes.hot_prefixes(_MOST_HOT_TOKENS)[:_MOST_HOT_PREFIXES]
    return [replace(prefix, held_at=held_at) for prefix in pinned + hot]


def merge_hot_prefixes(reports: Sequence[Sequence[CachedPrefix]], most_tokens: int) -> list[CachedPrefix]:
    """Merge the `hot_prefixes` of several engines: pinned ones first, then by the sum of hits.

    Args:
        most_tokens: most tokens of hot prefixes.
    """
    pinned: dict[str, CachedPrefix] = {}
    hot: dict[tuple[tuple[str, ...], tuple[int, ...]], CachedPrefix] = {}
    for prefix in (prefix for prefixes in reports for prefix in prefixes):
        if prefix.pin_name is not None:
            pinned.setdefault(prefix.pin_name, prefix)
            continue
        key = prefix.keys, prefix.token_ids
        hits = prefix.hits + (hot[key].hits if key in hot else 0)
        hot[key] = replace(prefix, hits=hits)
    chosen: list[CachedPrefix] = []
    for prefix in sorted(hot.values(), key=lambda prefix: -prefix.hits):
        if len(prefix.token_ids) <= most_tokens:
            most_tokens -= len(prefix.token_ids)
            chosen.append(prefix)
    return [*pinned.values(), *chosen]


def warm_prefixes(engine: Engine, reports: Sequence[Sequence[CachedPrefix]], limit_s: float) -> WarmedPrefixes:
    """Get, and pin where they are pinned, the `hot_prefixes` of engines with the same `Fingerprints.prefixes`: from
    them, where that takes less time than to compute them.

    The engine must have no other request. A failed step ends the warm-up early.

    Args:
        limit_s: prefixes that are not there within this time are left out.

    Raises:
        UnavailableError: a rank is lost.
        IntegrityError: the memory is inconsistent after a failed step.
    """
    deadline = time.monotonic() + limit_s
    capacity = engine.load.report(most_keys=0).total_tokens
    prefixes = merge_hot_prefixes(reports, capacity // 2)
    names = _add_prefixes(engine, prefixes)
    failed = len(prefixes) - len(names)
    done: list[str | None] = []
    try:
        while engine.has_work and time.monotonic() < deadline:
            for delta in engine.step():
                if delta.error is not None:
                    failed += 1
                    logger.warning("a prefix is not warmed: %s", delta.error)
                elif delta.ends_request:
                    done.append(names[delta.request_id])
            # On a shared device, without the memory that it may have later; or an adapter is being read.
            waits_s = max(deadline - time.monotonic(), 0)
            if engine.starved and not (engine.adapters.wait(waits_s) or engine.adapters.has_read):
                break
    except (IntegrityError, UnavailableError):
        raise
    except Exception:  # a prefix of a peer replica must not keep this engine from starting
        logger.exception("a step failed; the other prefixes are not warmed")
        failed += len(engine.requests)
        engine.cancel_all()
        engine.check_integrity()
    late = [names[request_id] for request_id in engine.requests]
    engine.cancel_all()
    if missing := [name for name in late if name is not None]:
        logger.warning("no time to pin %s; pin them again", ", ".join(map(repr, missing)))
    engine.reset_counts()
    return WarmedPrefixes(len(done) - done.count(None), done.count(None), failed, len(late))


def _add_prefixes(engine: Engine, prefixes: Sequence[CachedPrefix]) -> dict[str, str | None]:
    """Queue prefixes. Returns request id → name of the pin, of those that can be computed here."""
    names: dict[str, str | None] = {}
    for i, prefix in enumerate(prefixes):
        try:
            _add_prefix(engine, f"prefix {i}", prefix)
        except RequestError as error:  # adapters, context or pin quota differ here
            logger.warning("a prefix of %d tokens is not warmed: %s", len(prefix.token_ids), error)
        else:
            names[f"prefix {i}"] = prefix.pin_name
    return names


def _add_prefix(engine: Engine, request_id: str, prefix: CachedPrefix) -> None:
    adapter = adapter_of(prefix.keys)
    # Adapters' blocks are not given; and on a shared device an engine that waits for blocks would count as starved.
    held_at = "" if adapter is not None or engine.memory.may_be_empty else prefix.held_at
    if prefix.pin_name is None:
        _add(engine, request_id, prefix.token_ids, SamplingParams(max_tokens=1), prefix.keys, adapter, held_at)
    else:
        options = {"prefix_keys": prefix.keys, "adapter": adapter, "held_at": held_at}
        engine.prepare_pin(prefix.pin_name, prefix.token_ids, **options)(request_id)


def _add(
    engine: Engine,
    request_id: str,
    token_ids: Sequence[int],
    params: SamplingParams,
    keys: tuple[str, ...],
    adapter: str | None = None,
    held_at: str = "",
) -> None:
    """Queue a request of the engine itself; it asks for pooling if the model does not generate."""
    pooling = None
    if not engine.model.generates:
        assert engine.model.pooling is not None
        pooling = PoolingParams(engine.model.pooling.kind)
    request = EngineRequest(
        request_id, token_ids, params, adapter=adapter, pooling=pooling, prefix_keys=keys, held_at=held_at
    )
    engine.prepare(request)(request_id)
