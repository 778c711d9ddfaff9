"""The form of quantised weights, and rounding to it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from folio.kernels import QuantisedWeight, quantise, rounded_scales
from folio.kernels.quantised import LEAST_GROUP, SUPER_GROUP

OUTPUTS, INPUTS = 6, 512


def normal(outputs: int = OUTPUTS, inputs: int = INPUTS) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs)) * 0.02


def error(weight: torch.Tensor, found: torch.Tensor) -> float:
    """Relative to the weight's norm."""
    return float((found - weight).double().norm() / weight.double().norm())


def fields(bits: int, group: int, **others: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (OUTPUTS, INPUTS), dtype=torch.uint8, generator=generator)
    scales = torch.rand(OUTPUTS, INPUTS // group, generator=generator).half()
    return {"codes": codes, "bits": bits, "group": group, "scales": scales} | others


def integers(columns: int, dtype: torch.dtype) -> torch.Tensor:
    least = -60 if dtype == torch.int8 else 0
    return torch.randint(least, 63, (OUTPUTS, columns), generator=torch.Generator().manual_seed(columns)).to(dtype)


_SUPERS = torch.linspace(0.1, 0.2, OUTPUTS * 2).half().view(OUTPUTS, 2)
_FORMS: dict[str, dict[str, Any]] = {
    "zero": fields(4, 32, zero=8),
    "offsets": fields(5, 64, offsets=torch.linspace(-1, 1, OUTPUTS * 8).half().view(OUTPUTS, 8)),
    "super scales": fields(6, 16, scales=integers(32, torch.int8), super_scales=_SUPERS, zero=32),
    "super offsets": fields(
        4,
        32,
        scales=integers(16, torch.uint8),
        offsets=integers(16, torch.uint8),
        super_scales=_SUPERS,
        super_offsets=-_SUPERS,
    ),
    "table": fields(4, 32, table=tuple(range(-120, 120, 15))),
    "factors": fields(8, 32, zero=128, factors=torch.logspace(-6, 6, OUTPUTS)),
    "order": fields(8, 64, zero=128, order=torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("form", _FORMS)
def test_values_are_those_of_the_formula(form: str) -> None:
    given = _FORMS[form]
    weight = QuantisedWeight(**given)
    assert weight.shape == (OUTPUTS, INPUTS)
    supers, super_offsets = given.get("super_scales"), given.get("super_offsets")
    values = weight.dequantised()
    for output, column in [(0, 0), (1, 33), (3, 255), (4, 256), (5, INPUTS - 1)]:
        code, group = int(given["codes"][output, column]), column // given["group"]
        scale = float(given["scales"][output, group])
        scale *= 1 if supers is None else float(supers[output, column // SUPER_GROUP])
        expected = scale * (given["table"][code] if "table" in given else code - given.get("zero", 0))
        if "offsets" in given:
            factor = 1 if super_offsets is None else float(super_offsets[output, column // SUPER_GROUP])
            expected += factor * float(given["offsets"][output, group])
        expected *= float(given["factors"][output]) if "factors" in given else 1
        into = int(given["order"][column]) if "order" in given else column
        assert float(values[output, into]) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(weight.dequantised(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("form", [form for form in _FORMS if form != "order"])
@pytest.mark.parametrize("bounds", [(0, 256), (256, INPUTS), (0, INPUTS), (32, 96), (480, INPUTS)])
def test_columns(form: str, bounds: tuple[int, int]) -> None:
    """Also where they would cut groups, which become smaller; never super groups."""
    weight = QuantisedWeight(**_FORMS[form])
    if "super" in form and bounds[0] % SUPER_GROUP:
        with pytest.raises(ValueError, match=r"would cut a group of 256"):
            weight.columns(*bounds)
        return
    found = weight.columns(*bounds)
    assert torch.equal(found.dequantised(), weight.dequantised()[:, slice(*bounds)])


def test_columns_of_incomplete_groups() -> None:
    """Each output has one scale; the last group has 20 inputs."""
    for group, inputs in ((128, 116), (32, 116)):
        scales = torch.rand(3, -(-inputs // group)).half()
        weight = QuantisedWeight(torch.randint(0, 16, (3, inputs), dtype=torch.uint8), 4, group, scales, zero=8)
        for bounds in ((0, 64), (64, inputs), (96, inputs)):
            assert torch.equal(weight.columns(*bounds).dequantised(), weight.dequantised()[:, slice(*bounds)])
        with pytest.raises(ValueError, match=r"inputs 0 to 57 of 116 would cut a group of 32"):
            weight.columns(0, 58)


def test_columns_in_an_order_are_refused() -> None:
    with pytest.raises(ValueError, match="desc_act"):
        QuantisedWeight(**_FORMS["order"]).columns(0, 256)


@pytest.mark.parametrize("form", _FORMS)
def test_rows(form: str) -> None:
    weight = QuantisedWeight(**_FORMS[form])
    values, chosen = weight.dequantised(), torch.tensor([4, 0, 0])
    assert torch.equal(weight.rows(2, 5).dequantised(), values[2:5])
    assert torch.equal(weight.select(chosen).dequantised(), values[chosen])


_WRONG: dict[str, dict[str, Any]] = {  # what is said → fields
    "groups of 48 of 512 inputs in 8 bits": fields(8, 32) | {"group": 48},
    "groups of 16 of 512 inputs in 4 bits": fields(4, 16),
    "groups of 64 of 512 inputs in 4 bits": fields(4, 64, super_scales=_SUPERS),
    "a table of 15 for codes of 4 bits": fields(4, 32, table=(0,) * 15),
    "a table of 16 for codes of 8 bits": fields(8, 32, table=(0,) * 16),
    "scales [6, 16], not [6, 8]": fields(4, 64, scales=torch.ones(6, 16)),
    "offsets [6, 1], not [6, 8]": fields(4, 64, offsets=torch.ones(6, 1)),
    "super_scales [6, 1], not [6, 2]": fields(4, 32, super_scales=_SUPERS[:, :1]),
    "factors [5], not [6]": fields(4, 32, factors=torch.ones(5)),
    "order [6], not [512]": fields(4, 32, order=torch.arange(6)),
}


@pytest.mark.parametrize("said", _WRONG)
def test_shapes_that_do_not_fit(said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        QuantisedWeight(**_WRONG[said])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_the_nearest(bits: Any, group: int | None, dtype: torch.dtype) -> None:
    weight = normal(150).to(dtype).float()
    found = quantise(weight.to(dtype), bits, group)
    assert (found.bits, found.group, found.zero) == (bits, group or LEAST_GROUP[bits], 128 if bits == 8 else 0)
    most = {4: {None: 0.074, 64: 0.088, 512: 0.12}, 8: {None: 0.0055, 64: 0.0063, 512: 0.0085}}
    assert error(weight, found.dequantised()) < most[bits][group]
    # No other code is nearer.
    step = (found.scales.float() * (1 if found.factors is None else found.factors[:, None])).repeat_interleave(
        found.group, 1
    )
    far = (found.dequantised() - weight).abs() > step * 0.501
    last = 255 if bits == 8 else 15
    assert not (far & (found.codes > 0) & (found.codes < last)).any()


def test_four_bits_are_fitted_to_the_weights() -> None:
    """Scales of the least and the largest value alone are 6 % worse."""
    weight = normal(64).view(64, -1, 32)
    lows, tops = weight.aminmax(dim=-1, keepdim=True)
    steps = (tops - lows) / 15
    plain = ((weight - lows) / steps).round() * steps + lows
    assert error(weight.view(64, -1), quantise(weight.view(64, -1), 4).dequantised()) < 0.95 * error(weight, plain)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_equal_values_and_of_zeros(bits: Any) -> None:
    weight = torch.cat(
        (torch.full((OUTPUTS, 32), 0.3125), torch.zeros(OUTPUTS, 32), torch.full((OUTPUTS, 32), -5.0)), 1
    )
    found = quantise(weight, bits)
    assert torch.isfinite(found.dequantised()).all()
    assert (found.dequantised() - weight).abs().max() < 2e-3
    assert torch.equal(quantise(torch.zeros(2, 64), bits).dequantised(), torch.zeros(2, 64))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e10, 1e30])
def test_weights_beyond_float16(bits: Any, size: float) -> None:
    """Other outputs keep their values."""
    weight = normal()
    weight[2] *= size
    found = quantise(weight, bits)
    for output in range(OUTPUTS):
        assert error(weight[output], found.dequantised()[output]) < (0.09 if bits == 4 else 0.007)
    assert found.factors is not None


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_that_are_no_whole_groups(bits: Any) -> None:
    """The last ones are as exact as others."""
    weight = normal(OUTPUTS, 80) + 1
    found = quantise(weight, bits)
    assert (found.shape, found.scales.shape) == ((OUTPUTS, 80), (OUTPUTS, 3))
    assert (found.dequantised() - weight)[:, 64:].abs().max() < 0.005


def test_scales_that_float16_holds_need_no_factors() -> None:
    scales = torch.tensor([[0.01, 65504.0], [2.0**-24, 0.0]])
    halves, offsets, factors = rounded_scales(scales)
    assert (offsets, factors) == (None, None)
    assert torch.equal(halves, scales.half())


def test_scales_beyond_float16() -> None:
    scales, offsets = torch.tensor([[1e9, 2e9], [0.0, 0.0], [1.0, 2.0]]), torch.tensor([[-3e12, 0], [0, 0], [1, 4]])
    halves, half_offsets, factors = rounded_scales(scales, offsets)
    assert factors is not None
    assert half_offsets is not None
    assert torch.equal(factors, factors.log2().round().exp2()), "powers of 2 round nothing"
    assert torch.allclose(half_offsets.float() * factors[:, None], offsets, rtol=2**-11)
    assert torch.allclose(halves.float() * factors[:, None], scales, rtol=2**-11)
