"""Which of several outputs are let go, and with what."""

from __future__ import annotations

from folio.app.engine.request.best_of import BestOf
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.token_logprobs import TokenLogprobs


def test_the_first_of_the_best_has_the_prompts_log_probabilities() -> None:
    """Regression: they came with the sequence that computed the prompt, and were lost when that was not the best."""
    of_prompt = (TokenLogprobs(7, -1.0, 1),)
    selection = BestOf(2, keep_logprobs=False)
    for index, logprob in enumerate((-3.0, -1.0, -2.0)):
        entries = (TokenLogprobs(index, logprob, 1),)
        prompt = of_prompt if index == 0 else ()
        selection.hold(Delta("r", (index,), "", "stop", index=index, logprobs=entries, prompt_logprobs=prompt))
    best = selection.best()
    assert [(delta.index, delta.token_ids, delta.num_unfinished) for delta in best] == [(0, (1,), 1), (1, (2,), 0)]
    assert [delta.prompt_logprobs for delta in best] == [of_prompt, ()]
