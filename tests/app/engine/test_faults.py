"""A failure of a call that serves one request ends that request only.

Every such call is made to fail in turn, for two victims beside sixteen others of all kinds: for one when it is first
called, for the other a few calls later. The others get the tokens that they get without.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from folio.app.engine.engine import Engine
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.request.faults import FAILED
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.engine.sampling.state import SamplingState
from folio.app.errors import EngineError, FolioError, RequestError
from folio.vmem import SequenceMemory
from tests.app.engine.engines import TINY, engine_of, raising, steps, tokens_of
from tests.app.engine.lora.adapters import make_adapter
from tests.app.small_tokenizers import byte_level
from tests.conftest import MakeCheckpoint

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "internals" / "failing-calls.md"
# The second victim's call that fails.
LATER = 3
Outputs = dict[str, dict[int, tuple[int, ...]]]


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 380, (length,), generator=generator).tolist()


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 6, "temperature": 0, "ignore_eos": True} | settings))


REPEATING = tokens(5, 3) * 5
Ask = tuple[list[int], SamplingParams, dict[str, Any]]
OTHERS: dict[str, Ask] = {
    "greedy": (tokens(40, 1), params(), {}),
    "longer": (tokens(90, 2), params(max_tokens=9), {}),
    "sampled": (tokens(11, 4), params(temperature=1, seed=5), {}),
    "truncated": (tokens(12, 5), params(temperature=1.5, seed=6, top_k=9, top_p=0.8, min_p=0.01), {}),
    "schema": (tokens(9, 6), params(structure=Structure("json", '{"type": "object"}'), ignore_eos=False), {}),
    "choice": (tokens(9, 7), params(structure=Structure("choice", '["abc", "abd", "xyz"]'), ignore_eos=False), {}),
    "two": (tokens(13, 8), params(temperature=1, seed=7, n=2), {}),
    "best": (tokens(14, 9), params(temperature=1, seed=8, best_of=3), {}),
    "beams": (tokens(15, 10), params(use_beam_search=True, n=2, best_of=3), {}),
    "stop": (tokens(8, 11), params(stop=["e", "zz"]), {}),
    "logprobs": (tokens(10, 12), params(logprobs=3), {}),
    "prompt": (tokens(20, 13), params(prompt_logprobs=2), {}),
    "penalties": (REPEATING, params(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5), {}),
    "words": (tokens(7, 14), params(bad_words=["the quick", "a"], logit_bias={40: 5.0}), {}),
    "adapter": (tokens(16, 15), params(), {"adapter": "shared"}),
    "guessed": (REPEATING, params(max_tokens=12), {}),
}
# What a victim asks for; `seed` and the numbers of alternatives are nobody else's.
VICTIM_SEEDS = (901, 902)
VICTIMS: dict[str, Ask] = {
    "rich": (
        tokens(21, 20),
        params(
            n=2,
            temperature=1,
            top_p=0.9,
            min_p=0.001,
            stop=["never met"],
            logprobs=7,
            prompt_logprobs=6,
            repetition_penalty=1.2,
            bad_words=["the quick"],
            logit_bias={41: 1.0},
            min_tokens=5,
            stop_token_ids=[3],
        ),
        {},
    ),
    "plain": (tokens(19, 21), params(temperature=1), {}),
    "structured": (tokens(22, 22), params(temperature=1, n=2, structure=Structure("regex", "[a-z]{9}")), {}),
    "best": (tokens(23, 23), params(temperature=1, best_of=2), {}),
    "beams": (tokens(24, 24), params(use_beam_search=True, n=2, best_of=5), {}),
    # Two tokens in turns that nobody foresees: guesses are right now and then.
    "guessed": (REPEATING, params(max_tokens=20, temperature=3, logit_bias={50: 60.0, 51: 60.0}), {}),
    "adapter": (tokens(25, 25), params(), {"adapter": "mine"}),
    "pin": (tokens(64, 26), params(), {}),
}
Belongs = Callable[["Run", str, tuple[Any, ...]], bool]


@dataclass(frozen=True)
class Case:
    """A call that serves one request.

    Attributes:
        target: dotted, where it is looked up.
        victim: of `VICTIMS`.
        belongs: whether a call is the victim's; by default if one of its arguments is.
        expected: what the client gets.
    """

    target: str
    victim: str
    belongs: Belongs | None = None
    expected: str = "500"

    @property
    def name(self) -> str:
        return self.target.removeprefix("folio.app.engine.")


def with_params(run: Run, victim: str, arguments: tuple[Any, ...]) -> bool:
    """A list among the arguments has the victim's parameters, or its state."""
    return any(isinstance(a, list | tuple) and any(run.owner(item) == victim for item in a) for a in arguments)


def with_number(number: int) -> Belongs:
    return lambda _run, _victim, arguments: any(
        a == number if isinstance(a, int) else isinstance(a, list) and number in a for a in arguments
    )


def always(_run: Run, _victim: str, _arguments: tuple[Any, ...]) -> bool:
    return True


REFUSED, WITHOUT_DRAFTS = "500, before it begins", "its whole answer, without drafts"


class Run:
    """One engine, and what belongs to whom in it."""

    def __init__(self, engine: Engine, *without: str) -> None:
        self.engine = engine
        self.others = {name: ask for name, ask in OTHERS.items() if name not in without}
        self.victims = {seed: f"victim {i}" for i, seed in enumerate(VICTIM_SEEDS)}
        self.owned: list[tuple[object, str]] = []  # kept alive, so that nothing else gets their places

    def owner(self, thing: object) -> str | None:
        """The victim that something belongs to."""
        if isinstance(thing, EngineRequest | Request | Sequence | Delta):
            return thing.request_id if thing.request_id.startswith("victim") else None
        if isinstance(thing, SamplingState):
            thing = getattr(thing, "params", None)
        if isinstance(thing, SamplingParams):
            return self.victims.get(thing.seed or 0)
        if isinstance(thing, str):
            return thing if thing in self.victims.values() else None
        for part in ("sequence", "request"):  # of what is scheduled, of rows, of a turn, of beams
            if isinstance(getattr(thing, part, None), Request | Sequence):
                return self.owner(getattr(thing, part))
        self.look()
        return next((name for own, name in self.owned if own is thing), None)

    def look(self) -> None:
        """Note what the victims have by now."""
        for name in self.victims.values():
            request = self.engine.requests.get(name)
            for sequence in () if request is None else request.sequences:
                state = sequence.sampling
                mine = [state.matcher, state._counts, state._output, sequence.text, sequence.memory, sequence.token_ids]
                mine += [sequence.chain, sequence.request.selection]
                known = {id(own) for own, _ in self.owned}
                self.owned += [(own, name) for own in mine if own is not None and id(own) not in known]

    def __call__(self, victim: str | None = None) -> tuple[Outputs, dict[str, list[FolioError]]]:
        """Everybody's tokens, by output, and what they ended with."""
        engine = self.engine
        engine.cancel_all()  # of a test that has failed
        engine.memory.tree.clear()
        self.owned.clear()
        outputs: Outputs = defaultdict(lambda: defaultdict(tuple))
        errors: dict[str, list[FolioError]] = defaultdict(list)
        ended: set[str] = set()
        for name, (prompt, asked, options) in self.others.items():
            engine.submit(name, prompt, asked, **options)
        for number in range(400):
            if number == 1 and victim is not None:  # beside others that run
                for seed, name in self.victims.items():
                    self.submit(name, victim, seed, errors)
            self.look()
            for delta in engine.step():
                assert delta.request_id not in ended, f"{delta.request_id} goes on after its end"
                outputs[delta.request_id][delta.index] += delta.token_ids
                if delta.ends_request:
                    ended.add(delta.request_id)
                if delta.error is not None:
                    errors[delta.request_id].append(delta.error)
            engine.check_integrity()
            if not engine.has_work and number:
                break
        assert not engine.has_work, list(engine.requests)
        assert not engine.scheduler.unfinished()
        assert not engine.adapters.waiting_sequences
        for seed in VICTIM_SEEDS:
            engine.memory.unpin(f"pin {seed}") if f"pin {seed}" in {p.name for p in engine.report().pins} else None
        return {name: dict(of_name) for name, of_name in outputs.items()}, dict(errors)

    def submit(self, name: str, victim: str, seed: int, errors: dict[str, list[FolioError]]) -> None:
        prompt, asked, options = VICTIMS[victim]
        settings = {field: getattr(asked, field) for field in asked.__dataclass_fields__} | {"seed": seed}
        try:
            if victim == "pin":
                self.engine.pin(name, f"pin {seed}", [*prompt[:32], *tokens(32, seed)])
            else:
                self.engine.submit(name, prompt, SamplingParams(**settings), **options, timeout_s=600)
        except Exception:  # noqa: BLE001 - `AsyncEngine` makes a 500 of it
            errors[name].append(EngineError("refused"))


class Injection:
    """Fails the first call for one victim, and the third for the other."""

    def __init__(self, run: Run, case: Case) -> None:
        self.run, self.case = run, case
        self.num_calls: dict[str, int] = defaultdict(int)

    def note(self, *arguments: object) -> None:
        for name, fatal in zip(self.run.victims.values(), (1, LATER), strict=True):
            belongs = self.case.belongs
            if belongs(self.run, name, arguments) if belongs else any(self.run.owner(a) == name for a in arguments):
                self.num_calls[name] += 1
                if self.num_calls[name] >= fatal:  # a row is tried again by itself
                    raise RuntimeError("injected: a secret of somebody's")


def patch(monkeypatch: pytest.MonkeyPatch, target: str, note: Callable[..., None]) -> None:
    """Call `note` with the arguments of each call of a function, method or property, before it."""
    holder, name, original = look_up(target)
    if isinstance(original, property):
        getter = original.fget
        assert getter is not None

        def get(self: object) -> object:
            note(self)
            return getter(self)

        monkeypatch.setattr(holder, name, property(get))
        return

    @functools.wraps(original)
    def generate(*arguments: Any, **named: Any) -> Iterator[Any]:
        note(*arguments, *named.values())
        yield from original(*arguments, **named)

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        note(*arguments, *named.values())
        return original(*arguments, **named)

    monkeypatch.setattr(holder, name, generate if inspect.isgeneratorfunction(original) else call)


def look_up(target: str) -> tuple[Any, str, Any]:
    """The module or class that has it, its name there, and itself."""
    path, _, name = target.rpartition(".")
    try:
        holder: Any = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, of = path.rpartition(".")
        holder = getattr(importlib.import_module(module), of)
    return holder, name, vars(holder)[name]


def qualified(target: str) -> str:
    """Where it is defined."""
    *_, found = look_up(target)
    function = found.fget if isinstance(found, property) else found
    return f"{function.__module__}.{function.__qualname__}"


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    folder = make_checkpoint("llama", **TINY | {"num_hidden_layers": 2}, tie_word_embeddings=False)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    adapters = {name: tmp_path_factory.mktemp(name) for name in ("shared", "mine")}
    for seed, (_, adapter) in enumerate(adapters.items()):
        make_adapter(adapter, folder, "q_proj|down_proj", seed=seed)
    run = Run(make_engine(folder, speculation="ngram", adapters={name: str(at) for name, at in adapters.items()}))
    yield run
    run.engine.close()


@pytest.fixture(scope="module", autouse=True)
def longest_drafts() -> Iterator[None]:
    """Measured times say otherwise whom drafts pay for."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("folio.app.engine.speculation.length.choose_lengths", lambda _, most, *__, **___: list(most))
        yield


def make_engine(folder: Path, **settings: Any) -> Engine:
    sizes = {"kv_memory_bytes": 8 << 20, "max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 200}
    return engine_of(folder, dtype="float32", skip_tokenizer_init=False, **sizes, **settings)


@pytest.fixture(scope="module")
def expected(run: Run) -> Outputs:
    outputs, errors = run()
    assert not errors
    assert outputs.keys() == OTHERS.keys()
    assert run()[0] == outputs
    return outputs


@pytest.fixture(scope="module")
def whole(run: Run) -> Callable[[str], Outputs]:
    """Everybody's tokens beside victims that nothing happens to."""

    @functools.cache
    def of(victim: str) -> Outputs:
        outputs, errors = run(victim)
        assert not errors
        return outputs

    return of


def by_seed(run: Run, victim: str, arguments: tuple[Any, ...]) -> bool:
    return run.victims.get(arguments[0]) == victim


def structure_of_victims(_run: Run, _victim: str, arguments: tuple[Any, ...]) -> bool:
    return VICTIMS["structured"][1].structure in arguments


def adapter_of_victims(_run: Run, _victim: str, arguments: tuple[Any, ...]) -> bool:
    return any(getattr(argument, "name", argument) == "mine" for argument in arguments)


def cases(prefix: str, names: str, victim: str, belongs: Belongs | None = None, expected: str = "500") -> list[Case]:
    return [Case(f"folio.app.engine.{prefix}.{name}", victim, belongs, expected) for name in names.split()]


CASES = [
    # It begins.
    *cases("engine.Engine", "prepare add_request _set_deadline", "rich", expected=REFUSED),
    *cases(
        "step.intake.RequestValidator",
        "validate_request replay create_request _check_together _check_begun",
        "rich",
        expected=REFUSED,
    ),
    *cases("model.vocabulary.Vocabulary", "check_params state detokenizer _bad_words", "rich", expected=REFUSED),
    *cases("model.vocabulary.Vocabulary", "_matcher", "structured", expected=REFUSED),
    *cases("model.vocabulary.Vocabulary", "stop_token_ids", "beams", expected=REFUSED),
    *cases("model.vocabulary", "check_token_ids", "rich", expected=REFUSED),
    *cases(
        "sampling.structure.StructureCompiler", "check_structure matcher", "structured", structure_of_victims, REFUSED
    ),
    *cases("sampling.state.SamplingState", "__init__", "rich", expected=REFUSED),
    *cases("ranks.adapter_store.AdapterStore", "add", "rich", expected=REFUSED),
    *cases("ranks.adapter_store.AdapterStore", "ensure_loading", "adapter", adapter_of_victims),
    *cases("lora.rank.RankAdapters", "read", "adapter", adapter_of_victims),
    *cases("lora.layers.LoRALayers", "insert", "adapter", always),
    *cases("schedule.load_report.LoadMeter", "note_begun", "plain"),
    # A step has its next tokens.
    *(
        Case(f"folio.vmem.{name}", "plain")
        for name in (
            "prefix.prefix_cache.PrefixCache.match",
            "memory.KVMemory.share_prefix",
            "prefix.prefix_cache.PrefixCache.announce_prefill",
            "memory.KVMemory.append",
            "prefix.prefix_cache.PrefixCache.stage_prefix",
        )
    ),
    # Its tokens are guessed.
    *cases("speculation.speculation", "_can_speculate", "guessed", expected=WITHOUT_DRAFTS),
    *cases("speculation.speculation.Speculation", "_cut", "guessed", expected=WITHOUT_DRAFTS),
    *cases("speculation.ngram.NgramIndex", "extend find", "guessed", expected=WITHOUT_DRAFTS),
    *cases("sampling.state.SamplingState", "can_look_ahead", "guessed", expected=WITHOUT_DRAFTS),
    *cases("speculation.speculation.Speculation", "verified", "guessed"),
    *cases("speculation.length.LengthControl", "note", "guessed"),
    *cases("step.decoding.Decoder", "_roll_back", "guessed"),
    Case("folio.vmem.memory.KVMemory.truncate", "guessed"),
    # A token is chosen.
    *cases("step.token_selection", "_prompt_logprobs _rows_to_sample", "rich"),
    *cases("step.token_selection", "prompt_logprobs", "rich", with_number(6)),
    *cases("sampling.state.SamplingState", "fork forbidden counts", "rich"),
    *cases("sampling.state", "noise_key", "plain", by_seed, REFUSED),
    *cases("sampling.state.SamplingState", "allowed", "structured"),
    *cases("sampling.logits", "_fill_mask", "structured"),
    *cases("sampling.sampler", "gather_settings gather_edits", "rich", with_params),
    *cases("sampling.sampler", "_choose _choose_on_cpu", "plain", with_params),
    *cases("sampling.penalties.TokenCounts", "fork", "rich"),
    *cases("sampling.structure.StructureMatcher", "fill fork _note_error", "structured"),
    *cases("step.token_selection", "_beam_candidates", "beams"),
    *cases("step.token_selection", "likeliest", "beams", with_number(10)),
    *cases("sampling.beam.BeamSearch", "num_candidates", "beams"),
    # It is added.
    *cases("request.request.Sequence", "append _take", "rich"),
    *cases("sampling.state.SamplingState", "append", "rich"),
    *cases("sampling.penalties.TokenCounts", "add _append", "rich"),
    *cases("sampling.structure.StructureMatcher", "accept finished", "structured"),
    *cases("sampling.token_text.IncrementalDetokenizer", "push _decode flush", "rich"),
    *cases("step.decoding.Decoder", "_append _fork_all fork_sequence _ended", "rich"),
    *cases("step.decoding.Decoder", "_advance _best", "beams"),
    Case("folio.vmem.memory.KVMemory.fork", "rich"),
    *cases("sampling.beam.BeamSearch", "advance hypotheses _normalised _is_full", "beams"),
    *cases("request.request.Request", "emit", "rich"),
    *cases("request.best_of.BestOf", "hold best", "best"),
    *cases("request.ended_outputs.EndedOutputs", "add", "rich"),
    # A prefix is pinned.
    Case("folio.vmem.memory.KVMemory.pin", "pin"),
]
# Of these there is no row above: calls of one request whose failure is another's matter, or that are part of one above.
EXEMPT = {
    "composes the step out of the memory's books": (
        "schedule.scheduler.* schedule.scheduled.* schedule.admission.* schedule.waiting_queue.* "
        "schedule.running.RunningRequests.* schedule.read_ahead.*"
    ),
    "lays the step out": "execution.planner.* execution.rows.* layers.batch.*",
    "the boundary itself": "step.decoding.Decoder._add request.faults.attribute_failures.*",
    "frees what the request has, whatever happened": "step.decoding.Decoder.end_sequence speculation.*.forget_sequence",
    "adds up two numbers": "schedule.load_report.LoadMeter.note_ended",
    "is nothing but KVMemory.pin": "step.step_loop.StepLoop._pin",
    "is nothing but Engine.prepare and Engine.add_request": "engine.Engine.submit",
    "for tests": "*.check_integrity",
    "part of a call above": (
        "speculation.ngram.NgramIndex._sealed sampling.state.SamplingState._note_length "
        "sampling.structure.StructureMatcher.__init__ sampling.structure.StructureCompiler._behind "
        "sampling.structure.StructureCompiler._try sampling.token_text.IncrementalDetokenizer.__init__ "
        "sampling.penalties.TokenCounts.__init__ sampling.penalties.TokenCounts._set_entries "
        "request.best_of.BestOf.__init__ sampling.beam.BeamSearch.__init__ request.request.Sequence.__post_init__"
    ),
    "counts": "sampling.state.SamplingState.num_output_tokens "
    "request.request.*.num_* request.request.*.most_tokens request.request.*.max_sequences",
    "looks at numbers that have been checked": "sampling.params.*",
    "looks at its own fields": (
        "request.delta.Delta.* request.request.*.*_key request.request.*.can_decode request.request.*.lockstep "
        "request.request.*.reads_whole_prompt request.request.*.request_id"
    ),
}
EXEMPT_CALLS = [f"folio.app.engine.{glob}" for globs in EXEMPT.values() for glob in globs.split()]
# The memory's accounting: a call happens or changes nothing, else the engine stops.
EXEMPT_CALLS.append("folio.vmem.*")


@pytest.mark.thirds
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_failing_call_ends_its_request_only(
    case: Case,
    run: Run,
    expected: Outputs,
    whole: Callable[[str], Outputs],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Anything but two reasons of a parser failed the step, and with that everybody."""
    unharmed = whole(case.victim) if case.expected == WITHOUT_DRAFTS else {}
    if "mine" in (slots := run.engine.adapters.slots):
        slots |= {name: slots.pop(name) for name in list(slots) if name != "mine"}  # used more recently
        run.engine.adapters._evict()
    injection = Injection(run, case)
    with monkeypatch.context() as patches:
        patch(patches, case.target, injection.note)
        outputs, errors = run(case.victim)
    assert {name: outputs[name] for name in OTHERS} == expected
    assert injection.num_calls, "nothing was injected"
    if case.expected == WITHOUT_DRAFTS:
        assert not errors
        assert outputs == unharmed
        return
    failing = {name for name, n in zip(run.victims.values(), (1, LATER), strict=True) if injection.num_calls[name] >= n}
    if case.belongs in (None, by_seed, with_params):  # else nobody knows which of the two it was
        assert errors.keys() == failing
    assert "victim 0" in errors
    for name, [error] in errors.items():
        assert isinstance(error, EngineError)
        assert "secret" not in str(error) or case.victim == "adapter"
        if case.expected != REFUSED and case.belongs not in (adapter_of_victims, always):
            assert str(error) == FAILED
        if str(error) == FAILED:
            assert [record.getMessage() for record in caplog.records].count(f"request {name} failed") == 1


def test_every_call_for_one_request_is_among_the_cases(run: Run) -> None:
    """A call that is new here needs a row in the table above, or a reason why not."""
    seen: set[str] = set()
    structures = run.engine.vocabulary._structures
    assert structures is not None
    structures._compiled.cache_clear()
    kinds = (Request, SamplingState, SamplingParams, Sequence, Delta, SequenceMemory)
    kinds += tuple(
        getattr(importlib.import_module(f"folio.app.engine.{module}"), name)
        for module, name in (
            ("sampling.structure", "StructureMatcher"),
            ("sampling.token_text", "IncrementalDetokenizer"),
            ("sampling.penalties", "TokenCounts"),
            ("request.best_of", "BestOf"),
            ("sampling.beam", "BeamSearch"),
            ("schedule.scheduled", "Scheduled"),
            ("speculation.ngram", "NgramIndex"),
        )
    )

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(
            ("folio.app.engine.", "folio.vmem.memory", "folio.vmem.prefix.prefix_cache")
        ):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "<" not in code.co_qualname and any(isinstance(frame.f_locals.get(name), kinds) for name in names):
            seen.add(f"{module}.{code.co_qualname}")

    for victim in VICTIMS:
        sys.setprofile(note)
        try:
            run(victim)
        finally:
            sys.setprofile(None)
    assert len(seen) > 100
    known = {qualified(case.target) for case in CASES}
    missing = [name for name in sorted(seen - known) if not any(fnmatch.fnmatch(name, glob) for glob in EXEMPT_CALLS)]
    assert not missing
    assert not [glob for glob in EXEMPT_CALLS if not fnmatch.filter(seen, glob)]


def table() -> str:
    """What `docs/internals/failing-calls.md` has of it."""
    rows = [f"| `{case.name}` | {case.expected} | the same tokens |" for case in CASES]
    return "\n".join(["| call that fails | its client gets | the others get |", "|---|---|---|", *rows])


def test_the_table_is_in_the_documentation() -> None:
    """`python -m tests.app.engine.test_faults` prints it."""
    assert table() in DOCUMENT.read_text()


@pytest.mark.parametrize("target", ["_follow", "_add_task", "_open"])
def test_a_draft_model_that_fails_for_one_guesses_for_the_others(
    target: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed the step, or left what it had promised to others."""
    run = Run(make_engine(folder, speculation="draft", draft_model=str(folder)), "adapter")
    speculation = run.engine.speculation
    assert speculation is not None
    expected, _ = run("guessed")
    case = Case(f"folio.app.engine.speculation.draft.DraftProposer.{target}", "guessed")
    injection = Injection(run, case)
    patch(monkeypatch, case.target, injection.note)
    checks = speculation.counts.checks
    assert run("guessed") == (expected, {})
    assert injection.num_calls["victim 0"] == 1  # and is not asked again
    assert speculation.counts.checks > checks + 10
    run.engine.close()


def test_a_call_for_all_rows_that_fails_for_none_alone_is_tried_row_by_row(
    run: Run, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is short for all rows together is enough for each."""
    many = []

    def note(logits: torch.Tensor, *_: object) -> None:
        if len(logits) > 4:
            many.append(len(logits))
            raise RuntimeError("not enough memory")

    patch(monkeypatch, "folio.app.engine.step.token_selection.launch_sampling", note)
    assert run() == (expected, {})
    assert many


class PanicException(BaseException):
    """As `pyo3` calls it: no `Exception`."""


@pytest.mark.parametrize(
    ("victim", "target", "error", "said"),
    [
        # It went past every `except Exception`, and the engine's thread ended with it.
        ("plain", "token_text.IncrementalDetokenizer._decode", PanicException("byte 3 is no boundary"), FAILED),
        # What the client caused is told as it is.
        (
            "structured",
            "structure.StructureMatcher.fill",
            RequestError("this is too much", "structure"),
            "this is too much",
        ),
    ],
)
def test_special_errors_are_their_requests(
    run: Run,
    expected: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
    target: str,
    error: BaseException,
    said: str,
) -> None:
    def note(thing: object, *_: object) -> None:
        if run.owner(thing) == "victim 0":
            raise error

    patch(monkeypatch, f"folio.app.engine.sampling.{target}", note)
    outputs, errors = run(victim)
    assert {name: outputs[name] for name in OTHERS} == expected
    assert [str(error) for error in errors.pop("victim 0")] == [said]
    assert not errors


def test_a_fork_that_fails_leaves_its_parent_alone(
    run: Run, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two forks stayed in its parent's group when the second one could not be made."""
    engine = run.engine
    engine.memory.tree.clear()
    engine.submit("greedy", *OTHERS["greedy"][:2])
    output = [token for _ in range(2) for delta in engine.step() for token in delta.token_ids]
    with monkeypatch.context() as patches:
        calls = iter((lambda: None, raising(RuntimeError("injected"))))
        patch(patches, "folio.vmem.memory.KVMemory.fork", lambda *_: next(calls)())
        with pytest.raises(RuntimeError, match="injected"):
            engine.fork("greedy", "forks", params(n=2))
    engine.check_integrity()
    assert (*output, *tokens_of(list(steps(engine)))) == expected["greedy"][0]


if __name__ == "__main__":
    print(table())
