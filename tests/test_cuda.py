"""The quantize road on a GPU: what may differ from the CPU there, and what may not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import ON_GPU

from soar_prep.fouroversix.tensor import round_activations
from soar_prep.gptq.hessian import InputStatistics
from soar_prep.gptq.solve import solve_group
from soar_prep.settings import Quantize

pytestmark = [*ON_GPU]


def correlated(tokens: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    return torch.randn(tokens, columns, generator=generator) @ mixing


@pytest.mark.parametrize("columns", [48, 576, 1040])
def test_hessian_through_tensor_cores(columns: int):
    """Catches a low-precision sum: bf16 products are exact in fp32, so H agrees with float64 to 1e-5."""
    x = correlated(4096, columns).bfloat16()
    statistics = InputStatistics(columns, torch.device("cuda"))
    for batch in x.view(4, 1, 1024, columns):
        statistics.add(batch.cuda(), torch.ones(1, 1024, dtype=torch.bool, device="cuda"))
    expected = x.double().T @ x.double() / len(x)
    error = (statistics.finish()[0].cpu().double() - expected).norm() / expected.norm()
    print(f"K={columns}: relative error {error:.1e}")
    assert error < 1e-5


def test_activations_round_as_on_the_cpu():
    """Catches a GPU cast or division that is not IEEE: W4A4 figures would depend on the machine."""
    x = correlated(130, 576).bfloat16()
    scale = (x.abs().max() / (6 * 448)).float()
    assert torch.equal(round_activations(x.cuda(), scale.cuda()).cpu(), round_activations(x, scale))


def test_solver_agrees_with_the_cpu():
    """Catches a wrong factor or order on the GPU: scales are bitwise the CPU's, errors within 2 %.

    Codes may differ where two sums of different order fall on either side of a rounding border.
    """
    x = correlated(4096, 576)
    hessian = x.T @ x / len(x)
    weights = {"a": 0.02 * torch.randn(130, 576, generator=torch.Generator().manual_seed(4))}
    settings = Quantize(model="", output="")
    here = solve_group(weights, hessian, settings)["a"]
    there = solve_group({"a": weights["a"].cuda()}, hessian.cuda(), settings)["a"]
    scales = (here.weight.block_scales.view(torch.uint8), there.weight.block_scales.cpu().view(torch.uint8))
    same = (here.weight.codes == there.weight.codes.cpu()).float().mean().item()
    print(f"equal bytes of codes: {same:.2%}; errors {here.relative_error:.5f}, {there.relative_error:.5f}")
    assert torch.equal(*scales)
    assert same > 0.9
    assert there.relative_error == pytest.approx(here.relative_error, rel=0.02)


def test_road_in_bfloat16(soar_prep: Callable[..., Any], model_directory: Callable[[str], Path], tmp_path: Path):
    """Catches a tensor left on the wrong device, and a GPU run that is not the same twice (resume needs that)."""
    for output in ("first", "second"):
        ran = soar_prep(
            "quantize",
            f"model={model_directory('llama')}",
            f"output={tmp_path / output}",
            "calibration.samples=8",
            "calibration.length=64",
            "evaluation.samples=2",
            "evaluation.length=64",
            "compute.device=cuda",
        )
        assert (ran.code, ran.err) == (0, ""), ran.err
    for file in sorted((tmp_path / "first").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name
    facts = json.loads((tmp_path / "first" / "run.json").read_text())
    print({scheme: round(q["kl"], 4) for scheme, q in facts["quality"].items()})
    assert facts["environment"]["device"] == torch.cuda.get_device_name()
    assert soar_prep("verify", tmp_path / "first").code == 0
