"""Random quantised weights of every form."""

from __future__ import annotations

from typing import Any

import torch

from folio.kernels.quantised import LEAST_GROUP, SUPER_GROUP, Bits, QuantisedWeight

FORMS = ["scales", "offsets", "wide groups", "nested", "nested offsets"]
CASES = [*((bits, form) for bits in LEAST_GROUP for form in FORMS), (4, "table")]
INPUTS = 512


def random_weight(bits: Bits, form: str, outputs: int, inputs: int = INPUTS) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(bits)
    group, groups = LEAST_GROUP[bits], -(-inputs // LEAST_GROUP[bits])

    def halves(width: int) -> torch.Tensor:
        return torch.randn(outputs, width, generator=generator).half()

    def integers(low: int, high: int, width: int) -> torch.Tensor:
        return torch.randint(low, high, (outputs, width), generator=generator, dtype=torch.int16)

    codes = integers(0, 2**bits, inputs).byte()
    others: dict[str, Any] = {
        "scales": {"scales": halves(groups), "zero": 2 ** (bits - 1)},
        "offsets": {"scales": halves(groups), "offsets": halves(groups)},
        "wide groups": {
            "group": 4 * group,
            "scales": halves(groups // 4),
            "offsets": halves(groups // 4),
            "order": torch.randperm(inputs, generator=generator),
            "factors": torch.rand(outputs, generator=generator),
        },
        "nested": {
            "scales": integers(-128, 128, groups).char(),
            "super_scales": halves(inputs // SUPER_GROUP),
            "zero": 2 ** (bits - 1),
        },
        "nested offsets": {
            "scales": integers(0, 64, groups).byte(),
            "super_scales": halves(inputs // SUPER_GROUP),
            "offsets": integers(0, 64, groups).byte(),
            "super_offsets": halves(inputs // SUPER_GROUP),
        },
        "table": {"scales": halves(groups), "table": tuple(range(-127, 128, 16))},
    }
    return QuantisedWeight(codes, bits, **{"group": group} | others[form])
