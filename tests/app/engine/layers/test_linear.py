from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from folio.app.compat.torch import onednn_linear, onednn_supports
from folio.app.config.engine import EngineConfig
from folio.app.engine.layers.fusion import fuse_attention, fuse_modules
from folio.app.engine.layers.linear import (
    Product,
    choose_product,
    onednn_product,
    pack_linears,
    packed_by,
    use_few_row_products,
)
from folio.app.engine.model.loader import load_model
from folio.app.errors import ConfigError
from folio.kernels import CpuElementwise, CpuLinear
from tests.app.engine.layers.models import bind_reference, make_model


def products(dtype: torch.dtype) -> list[Product]:
    own = CpuLinear()
    there: list[Product] = [] if own.unsupported(dtype) else [Product(own.pack, own)]
    if onednn_supports(dtype):
        there.append(onednn_product())
    return there or pytest.skip(f"no products of {dtype} here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias, dtype=dtype)
    for product in products(dtype):
        packed = packed_by(product)("", plain)
        for rows in (1, 3, 70):
            x = torch.randn(1, rows, 48, dtype=dtype)
            torch.testing.assert_close(packed(x), plain(x), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=2e-2)


_MANY_NUMBERS_OF_ROWS = """
import psutil, torch
from folio.app.engine.layers.linear import onednn_product

def private_mib():
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / (1 << 20)

product = onednn_product()
weight, x = product.pack(torch.ones(64, 64)), torch.ones(300, 64)
product.multiply(x, weight, None)
before = private_mib()
for rows in range(1, 300):
    product.multiply(x[:rows], weight, None)
print(private_mib() - before)
"""


@pytest.mark.processes
def test_memory_does_not_grow_with_the_number_of_row_counts() -> None:
    out = subprocess.run([sys.executable, "-c", _MANY_NUMBERS_OF_ROWS], check=True, capture_output=True, text=True)
    assert float(out.stdout) < 100  # 300 to 600 MiB unless only a few are kept


def test_every_linear_of_a_model_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Conv1D(4, 8), nn.ReLU()), nn.Embedding(4, 4))
    x = torch.randn(1, 5, 8)
    expected = model[1][0](model[0](x)).relu()  # type: ignore[index]
    assert pack_linears(model, packed_by(onednn_product())) == 2
    torch.testing.assert_close(model[1](model[0](x)), expected)
    assert [type(m).__name__ for m in model[1]] == ["PackedLinear", "ReLU"]  # type: ignore[union-attr]


@torch.inference_mode()
def test_few_rows_of_attention_have_their_own_product() -> None:
    """With the original's parameters, so that what else a model refers to is unchanged."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("for the interpreter; tests/kernels/triton/test_product.py runs on the device")
    from folio.kernels.triton.product import TritonProduct

    rows: list[int] = []

    class Counted(TritonProduct):
        def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows.append(x.numel() // x.shape[-1])
            return super().__call__(x, weight, bias)

    model, ops = make_model("qwen2", torch.bfloat16), CpuElementwise()
    fuse_modules(model, ops)
    assert fuse_attention(model, ops) == 3
    paths, merged = [path for path, _ in model.named_parameters()], model.model.layers[0].self_attn.qkv_proj.merged
    bind_reference(model)
    tokens = [torch.randint(400, (1, count)) for count in (1, 16, 17)]
    expected = [model(ids, use_cache=False).logits for ids in tokens]
    assert use_few_row_products(model, Counted()) == 6
    bind_reference(model)
    for ids, logits in zip(tokens, expected, strict=True):
        off = (model(ids, use_cache=False).logits - logits).abs().max() / logits.abs().max()
        assert off < 0.03
    assert rows == [1] * 6 + [16] * 6
    assert [path for path, _ in model.named_parameters()] == paths
    assert model.model.layers[0].self_attn.qkv_proj.merged == merged


@pytest.mark.parametrize("setting", ["few_row_products", "dependent_launch"])
def test_variants_of_cuda_are_refused_on_a_cpu(setting: str) -> None:
    config = EngineConfig(model="builtin", skip_tokenizer_init=True, **{setting: True})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{setting}.*leave both out"):
        load_model(config.on_device("cpu"))


def test_unsupported_dtypes_stay_unpacked_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_product(torch.float64) is None
    assert "stay unpacked" in caplog.text


def multiply_of(dtype: torch.dtype) -> object:
    product = choose_product(dtype)
    return product and product.multiply


def test_weights_that_move_are_plain_tensors() -> None:
    """oneDNN's are not."""
    for dtype in (torch.bfloat16, torch.float32):
        product = choose_product(dtype, movable=True)
        assert product is None or isinstance(product.multiply, CpuLinear)
    assert choose_product(torch.float16, movable=True) is None


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler() -> None:
    """Other kernels replace Folio's own, but none has 8-bit weights, which is an error."""
    assert multiply_of(torch.float32) is onednn_linear
    config = EngineConfig(model="builtin", skip_tokenizer_init=True, quantization="int8")
    with pytest.raises(ConfigError, match=r"'int8'.*no C\+\+ compiler.*; use 'none'"):
        load_model(config.on_device("cpu"))
