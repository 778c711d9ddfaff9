"""`folio bench`: latency and throughput of a server of the OpenAI API under open-loop load."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from folio.app.cli.connection import DEFAULT_URL, ApiKey, Model, Server, Url
from folio.app.cli.text import console, printable, show_ms, table
from folio.app.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from folio.app.cli.bench.load import Ask, HttpTarget, Record

EXAMPLES = """
folio bench
folio bench --rates 1,2,4,8 --duration 60 --prompt-tokens 512 --output-tokens 128 --out results
folio bench --url http://127.0.0.1:11434 --model qwen3 --slo-ttft 0.5 --slo-tpot 0.05
folio bench --prefix-tokens 400 --prompt-tokens 512 --json
"""

_SHARES = (0.5, 0.9, 0.99)
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)


@dataclass(frozen=True, slots=True)
class Load:
    """The load to put on the server.

    Attributes:
        rates: arrivals a second, one run each.
        prefix_tokens: of the prompt's tokens, those that all prompts share.
        slo_ttft_s, slo_tpot_s: bounds of an answer that counts for goodput.
    """

    rates: tuple[float, ...]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int
    seed: int
    slo_ttft_s: float
    slo_tpot_s: float
    api: Literal["chat", "completions"]


def bench(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    rates: Annotated[str, typer.Option(help="Requests a second, a run each, separated by commas.")] = "1,2,4,8",
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds in which requests arrive, for each rate.")] = 30.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, about.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 64,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens that all prompts share at the beginning.")] = 0,
    slo_ttft: Annotated[float, typer.Option(min=0.0, help="Bound of TTFT for goodput, in seconds.")] = 1.0,
    slo_tpot: Annotated[float, typer.Option(min=0.0, help="Bound of TPOT for goodput, in seconds.")] = 0.1,
    api: Annotated[Literal["chat", "completions"], typer.Option(help="Path below /v1.")] = "chat",
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0,
    warm_up: Annotated[int, typer.Option(min=1, help="Requests before the first run.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json and bench.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON line at the end.")] = False,
) -> None:
    """Measure a server: TTFT, TPOT, output tokens/s and goodput at several rates of Poisson arrivals.

    Requests are sent when they are due, however many are in flight, and times count from then.
    Prompts are random words.
    """
    if prefix_tokens >= prompt_tokens:
        raise typer.BadParameter(
            f"--prefix-tokens is {prefix_tokens}; it must be below --prompt-tokens, {prompt_tokens}"
        )
    load = Load(
        parse_rates(rates), duration, prompt_tokens, output_tokens, prefix_tokens, seed, slo_ttft, slo_tpot, api
    )  # fmt: skip
    if out is not None:
        try:  # before minutes of requests
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(out, error) from None
    results = asyncio.run(measure(Server(url, api_key), model, load, warm_up))
    print_table(results)
    if out is not None:
        _save(results, out)
    if as_json:
        print(json.dumps(results))


def parse_rates(text: str) -> tuple[float, ...]:
    """The rates of `--rates`. Raises `typer.BadParameter` unless they are positive numbers."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise typer.BadParameter(f"--rates is {text!r}; write positive numbers such as 1,2,4")
    return rates


async def measure(server: Server, model: str | None, load: Load, num_warm_up: int) -> dict[str, Any]:
    """Warm up, and make all runs. Raises `FolioError` if the server cannot be measured."""
    from folio.app.cli.bench.load import HttpTarget, open_loop

    async with server:
        name = await server.choose_model(model)
        target = HttpTarget("server", server.url, name, server.session, is_chat=load.api == "chat")
        prompts = Prompts(load)
        await _warm_up(target, prompts, load, num_warm_up)
        runs = []
        for number, rate in enumerate(load.rates):
            asks = prompts.asks(rate, seed=load.seed * 1000 + number)
            print(f"{rate:g} requests/s: {len(asks)} requests in {load.duration_s:g} s …", file=sys.stderr, flush=True)
            runs.append(summary(rate, await open_loop(target, asks), load))
    return {
        "url": server.url,
        "model": name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": asdict(load),
        "has_usage": any(run["mean_prompt_tokens"] for run in runs),
        "has_fixed_length": "ignore_eos" in target.options,
        "runs": runs,
    }


class Prompts:
    """Random prompts. `tokens_per_word` begins with a guess and follows the server's usage."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._vocabulary = _TEXT.split()
        self.tokens_per_word = 1.0

    def asks(self, rate: float, seed: int) -> list[Ask]:
        from folio.app.cli.bench.load import poisson

        return [
            self.ask(seed=seed * 10**6 + i, at_s=at) for i, at in enumerate(poisson(rate, self._load.duration_s, seed))
        ]

    def ask(self, seed: int, at_s: float = 0.0) -> Ask:
        """A request with a prompt of its own, and the prefix that all share."""
        from folio.app.cli.bench.load import Ask as Request

        load = self._load
        prefix = self._words(random.Random(load.seed), load.prefix_tokens)
        own = self._words(random.Random(seed), load.prompt_tokens - load.prefix_tokens)
        if load.api == "completions":
            return Request(f"{prefix} {own}".strip(), load.output_tokens, at_s)
        messages = [{"role": "system", "content": prefix}] if prefix else []
        return Request([*messages, {"role": "user", "content": own}], load.output_tokens, at_s)

    def _words(self, rng: random.Random, num_tokens: int) -> str:
        return " ".join(rng.choices(self._vocabulary, k=math.ceil(num_tokens / self.tokens_per_word)))


async def _warm_up(target: HttpTarget, prompts: Prompts, load: Load, count: int) -> None:
    """Send requests one by one; leave out options that the server refuses, and learn the tokens of a word.

    Raises `UnavailableError` if the server answers none."""
    from folio.app.cli.bench.load import Clock, Record

    done = 0
    while done < count:
        record = Record(0.0, load.output_tokens)
        await target(prompts.ask(seed=-1 - done), record, Clock())
        refused = [name for name in target.options if record.status in (400, 422) and name in (record.error or "")]
        if refused:
            del target.options[refused[0]]
            continue
        if not record.answered:
            why = printable(_message(record.error or "it sent no text"))
            status = f"status {record.status}: " if record.status else ""
            raise UnavailableError(f"the server does not answer a first request: {status}{why}")
        if record.num_prompt_tokens and not done:
            prompts.tokens_per_word *= record.num_prompt_tokens / load.prompt_tokens
        done += 1


def _message(error: str) -> str:
    """The message in an error's JSON, or the beginning of the error."""
    try:
        return str(json.loads(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return error[:200]


def summary(rate: float, records: Sequence[Record], load: Load) -> dict[str, Any]:
    """The figures of one run."""
    answered = [record for record in records if record.answered]
    spans = [record for record in answered if record.num_tokens > 1]
    whole_s = max(load.duration_s, *(record.ended_s or 0.0 for record in records), 0.0)
    good = [r for r in answered if r.ttft_s <= load.slo_ttft_s and (r.num_tokens < 2 or r.tpot_s <= load.slo_tpot_s)]
    prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    return {
        "rate": rate,
        "num_requests": len(records),
        "num_answered": len(answered),
        "errors": dict(Counter(kind_of_error(record) for record in records if not record.answered)),
        "seconds": whole_s,
        "ttft_s": _percentiles([record.ttft_s for record in answered]),
        "tpot_s": _percentiles([record.tpot_s for record in spans]),
        "output_tokens_per_s": sum(record.num_tokens for record in answered) / whole_s,
        "goodput_per_s": len(good) / whole_s,
        "goodput_share": len(good) / len(records) if records else 0.0,
        "mean_prompt_tokens": prompt_tokens / len(answered) if answered else 0.0,
        "mean_output_tokens": sum(record.num_tokens for record in answered) / len(answered) if answered else 0.0,
        "cached_share": sum(r.num_cached_tokens for r in answered) / prompt_tokens if prompt_tokens else 0.0,
    }


def kind_of_error(record: Record) -> str:
    """A short name for a request's failure."""
    if record.status == 0:
        return "connection lost"
    if record.status != 200:
        return f"HTTP {record.status}"
    if record.error is not None:
        return "error in the stream"
    return "no text" if record.done else "stream without an end"


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The smallest value that this share of all values does not exceed."""
    ordered = sorted(values)
    return {f"p{share * 100:g}": ordered[math.ceil(share * len(ordered)) - 1] if ordered else None for share in _SHARES}


def print_table(results: dict[str, Any]) -> None:
    load, runs, screen = results["load"], results["runs"], console()
    times = [("TTFT", "ttft_s"), ("TPOT", "tpot_s")]
    columns = [column for name, _ in times for column in (f"{name} p50", "p90", "p99")]
    shown = table(None, "req/s", "answered", *columns, "tok/s", "good/s", "good")
    for run in runs:
        shown.add_row(
            f"{run['rate']:g}",
            f"{run['num_answered']}/{run['num_requests']}",
            *(show_ms(value) for _, key in times for value in run[key].values()),
            f"{run['output_tokens_per_s']:.1f}",
            f"{run['goodput_per_s']:.2f}",
            f"{run['goodput_share']:.0%}",
        )
    screen.print(f"{results['model']} at {results['url']}", style="bold")
    shown.collapse_padding = True  # it fits 80 columns with usual figures
    console(100).print(shown)
    prompt, output, cached = (
        sum(run[key] for run in runs) / len(runs)
        for key in ("mean_prompt_tokens", "mean_output_tokens", "cached_share")
    )
    screen.print(
        "TTFT and TPOT in ms, output tokens/s. "
        f"Answers are good with TTFT up to {load['slo_ttft_s']:g} s and TPOT up to {load['slo_tpot_s']:g} s. "
        f"Mean prompt {prompt:.0f} tokens ({cached:.0%} cached), mean answer {output:.0f}.",
        style="dim",
    )
    if not results["has_usage"]:
        screen.print("The server sends no usage: output tokens are events with text, and may be more.", style="yellow")
    for run in runs:
        if run["errors"]:
            kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(run["errors"].items()))
            screen.print(f"{run['rate']:g} requests/s: {kinds}", style="red")


def _save(results: dict[str, Any], folder: Path) -> None:
    """Write bench.json and, if matplotlib is installed, bench.png. Raises `ConfigError` if they cannot be written."""
    written = "bench.json"
    try:
        (folder / written).write_text(json.dumps(results, indent=2) + "\n")
        draw(results, folder / "bench.png")
        written += " and bench.png"
    except OSError as error:
        raise _not_writable(folder, error) from None
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("no picture: matplotlib is not installed; pip install 'folio-serve[bench]'", file=sys.stderr)
    print(f"written to {folder}: {written}", file=sys.stderr)


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {folder} cannot be written: {error.strerror}")


def draw(results: dict[str, Any], path: Path) -> None:
    """Four plots over the rate. Raises `ModuleNotFoundError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import StrMethodFormatter

    runs, load = results["runs"], results["load"]
    rates = [run["rate"] for run in runs]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    figure.suptitle(
        f"{results['model']}, {results['at'][:10]}: prompts of {load['prompt_tokens']} tokens "
        f"({load['prefix_tokens']} shared), answers of up to {load['output_tokens']}"
    )
    for axis, name, title, slo in (
        (axes[0, 0], "ttft_s", "Time to first token (TTFT), ms", load["slo_ttft_s"]),
        (axes[0, 1], "tpot_s", "Time per later token (TPOT), ms", load["slo_tpot_s"]),
    ):
        for share in _SHARES:
            key = f"p{share * 100:g}"
            points = [(r["rate"], r[name][key] * 1e3) for r in runs if r[name][key] is not None]
            axis.plot(*zip(*points, strict=True), marker="o", label=key) if points else None
        axis.axhline(slo * 1e3, linestyle=":", color="gray", label="bound for goodput")
        axis.set(title=title, yscale="log")
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        axis.legend()
    axes[1, 0].plot(rates, [run["output_tokens_per_s"] for run in runs], marker="o")
    axes[1, 0].set(title="Output tokens/s", ylim=(0, None))
    offered = [run["num_requests"] / run["seconds"] for run in runs]
    axes[1, 1].plot(rates, offered, linestyle=":", color="gray", label="all requests")
    axes[1, 1].plot(rates, [run["goodput_per_s"] for run in runs], marker="o", label="answers within both bounds")
    axes[1, 1].set(title="Goodput, requests/s", ylim=(0, None))
    axes[1, 1].legend()
    for axis in axes.flat:
        axis.set_xlabel("requests/s offered (Poisson arrivals)")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
