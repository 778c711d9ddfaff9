"""Output tokens per second: Folio beside what transformers offers, in one process and one run.

16 requests at once, prompts of 32 to 512 tokens, 64 new tokens each, greedy, no EOS, on random weights in the shape of
Qwen2.5-0.5B, bfloat16. The rivals are `generate` on a left-padded batch and continuous batching (`generate_batch`).
Tokens are counted over the whole wall time, prefill included.

--quick keeps 4 of 24 layers and runs once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen2Config

from app.engine import LLM, SamplingParams
from benchmarks import harness

NUM_REQUESTS, SHORTEST, LONGEST, NEW_TOKENS = 16, 32, 512, 64
SINGLE_PROMPT = 32
SEED = 5


def make_checkpoint(folder: Path, num_layers: int) -> None:
    """Random weights in the shape of Qwen2.5-0.5B."""
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def make_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.linspace(SHORTEST, LONGEST, NUM_REQUESTS).int().tolist()
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def run_folio(llm: LLM, prompts: list[list[int]]) -> float:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    completions = llm.generate(prompts, params)
    elapsed = time.perf_counter() - start
    assert all(len(c.token_ids) == NEW_TOKENS for c in completions)
    return len(prompts) * NEW_TOKENS / elapsed


def run_generate(model: Any, prompts: list[list[int]]) -> float:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    elapsed = time.perf_counter() - start
    assert out.shape[1] == longest + NEW_TOKENS
    return len(prompts) * NEW_TOKENS / elapsed


def run_continuous_batching(model: Any, prompts: list[list[int]]) -> float:
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=256, num_blocks=64, max_batch_tokens=1024)
    start = time.perf_counter()
    outputs = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    elapsed = time.perf_counter() - start
    assert [len(o.generated_tokens) for o in outputs.values()] == [NEW_TOKENS] * len(prompts)
    return len(prompts) * NEW_TOKENS / elapsed


def single_stream(llm: LLM, prompt: list[int]) -> float:
    """Decode steps a second of one request, prefill left out."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    llm.engine.submit("single", prompt, params)
    llm.engine.step()
    start, steps = time.perf_counter(), 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    return steps / (time.perf_counter() - start)


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    num_layers, repeats = (4, 1) if args.quick else (24, 3)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), num_layers)
        llm = LLM(folder, skip_tokenizer_init=True, prefix_cache=False)  # each run would find the prompts of the last
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        num_parameters = sum(p.numel() for p in model.parameters())
        prompts = make_prompts(model.config.vocab_size)
        rates = harness.alternate(
            {
                "folio": lambda: run_folio(llm, prompts),
                "transformers_generate": lambda: run_generate(model, prompts),
                "transformers_cb": lambda: run_continuous_batching(model, prompts),
            },
            repeats,
        )
        single_stream(llm, prompts[0][:SINGLE_PROMPT])
        single = [single_stream(llm, prompts[0][:SINGLE_PROMPT]) for _ in range(3)]
        bandwidth = harness.read_bandwidth()
        flops = harness.matrix_rate(torch.bfloat16)
        llm.engine.check_integrity()
        llm.close()

    weight_bytes = 2 * num_parameters
    prompt_tokens = sum(map(len, prompts))
    body = num_parameters - 151936 * 896
    # No faster than the prompts' products at the measured matrix rate, then all weights read once a step.
    prefill_s = 2 * body * prompt_tokens / flops
    limit = NUM_REQUESTS * NEW_TOKENS / (prefill_s + NEW_TOKENS * weight_bytes / bandwidth)
    figures = {
        "batch16_vs_transformers_cb": harness.median_ratio(rates["folio"], rates["transformers_cb"]),
        "batch16_vs_transformers_generate": harness.median_ratio(rates["folio"], rates["transformers_generate"]),
        "batch16_tokens_per_s": statistics.median(rates["folio"]),
        "batch16_share_of_limit": statistics.median(rates["folio"]) / limit,
        "single_tokens_per_s": statistics.median(single),
        "single_share_of_bandwidth": statistics.median(single) * weight_bytes / bandwidth,
        "read_bandwidth_gb_per_s": bandwidth / 1e9,
        "matrix_gflop_per_s": flops / 1e9,
    }
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n16 requests at once, {prompt_tokens} prompt tokens, {num_layers} layers, {repeats} runs each")
    for name, rate in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"  {name:24s}{rate:8.1f} tok/s   Folio is {medians['folio'] / rate:.2f}x")
    print(f"  {'limit':24s}{limit:8.1f} tok/s   at {bandwidth / 1e9:.1f} GB/s and {flops / 1e9:.0f} GFLOP/s")
    print("single stream")
    print(f"  {'folio':24s}{figures['single_tokens_per_s']:8.1f} tok/s")
    print(f"  {'limit':24s}{bandwidth / weight_bytes:8.1f} tok/s")
    draw(medians, limit, harness.results_folder(args) / f"throughput{'-quick' if args.quick else ''}.png")
    harness.finish("throughput", args, figures, {"tokens_per_s": rates, "single_tokens_per_s": single})


def draw(medians: dict[str, float], limit: float, path: Path) -> None:
    pyplot = harness.pyplot()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(6, 2.5), layout="constrained")
    axes.barh(list(medians), list(medians.values()), color=["#2a6f97", "#b0b0b0", "#b0b0b0"])
    axes.axvline(limit, color="#c1121f", linestyle="--", label="limit of bandwidth and matrix rate")
    axes.invert_yaxis()
    axes.set_xlabel("output tokens/s, 16 requests at once")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
