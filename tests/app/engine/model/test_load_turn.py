"""Load turns: a load that hangs in transformers fails others, with its name; its files are read before its turn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.engine.model import checkpoint_files, checkpoint_module
from folio.app.engine.model.load_turn import LoadTurn
from folio.app.engine.model.loader import load_model
from folio.app.engine.model.weight_store import WeightStore
from folio.app.errors import UnavailableError
from tests.app.engine.model.test_models import ALL
from tests.conftest import MakeCheckpoint


@pytest.mark.parametrize(
    ("owner", "name"), [(checkpoint_module.AutoModelForCausalLM, "from_pretrained"), (checkpoint_files, "_read")]
)
def test_a_load_whose_files_do_not_answer(
    owner: Any, name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it held a lock, and no other model could be loaded until the process ended. Now its files have been
    read before. If they do not answer later, the error of other loads names it."""
    dead, other = (str(make_checkpoint(ALL[model][0], **ALL[model][1])) for model in ("llama", "qwen2"))
    asked, answers = threading.Event(), threading.Event()
    real = getattr(owner, name)

    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).startswith(dead):
            asked.set()
            assert answers.wait(60)
        return real(path, *args, **kwargs)

    def load(model: str) -> None:
        config = EngineConfig(model=model, skip_tokenizer_init=True).on_device("cpu")
        loaded = load_model(config, weights=WeightStore(tmp_path))
        assert loaded.weights is not None
        loaded.weights.close()

    monkeypatch.setattr(owner, name, read)
    monkeypatch.setattr(checkpoint_module, "_load_turn", LoadTurn(0.1))
    thread = threading.Thread(target=load, args=(dead,))
    thread.start()
    assert asked.wait(60)
    if name == "_read":
        load(other)
    else:
        with pytest.raises(
            UnavailableError, match=rf"of '{other}' has waited 0 s for that of '{dead}', .* restart the"
        ):
            load(other)
    answers.set()
    thread.join(60)
    load(other)
    load(dead)
