import pytest
import torch
from torch import Tensor

from soar_prep.errors import UserError
from soar_prep.fouroversix.blocks import tensor_scale_for
from soar_prep.fouroversix.e2m1 import E2M1_VALUES
from soar_prep.fouroversix.tensor import NVFP4Tensor, quantize_to_nvfp4
from soar_prep.gptq.hessian import damped_diagonal, factorize
from soar_prep.gptq.solve import Solved, solve, solve_group
from soar_prep.settings import Method, Quantize, ScaleError, ScaleRule

ROWS = [1, 15, 17, 130]


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def hessian_of(columns: int, seed: int = 0) -> Tensor:
    """Second moment of correlated inputs with columns of different size."""
    mixing = gaussian(columns, columns, seed) / columns**0.5 + 0.3 * torch.eye(columns)
    size = torch.logspace(-0.5, 0.5, columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    x = (gaussian(8 * columns, columns, seed + 1) @ mixing) * size
    return x.T @ x / len(x)


def settings(**changes: object) -> Quantize:
    return Quantize(**{"model": "m", "output": "o"} | changes)  # type: ignore[arg-type]


def bits(weight: NVFP4Tensor) -> tuple[bytes, bytes, float]:
    """All that a file holds of a weight."""
    scales = weight.block_scales.view(torch.uint8)
    return weight.codes.numpy().tobytes(), scales.numpy().tobytes(), weight.tensor_scale.item()


def output_error(weight: Tensor, quantized: NVFP4Tensor, hessian: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T) in float64, the share of output energy lost."""
    w, h = weight.double(), hessian.double()
    d = w - quantized.dequantize().double()
    return (torch.trace(d @ h @ d.T) / torch.trace(w @ h @ w.T)).item()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize("rows", ROWS)
def test_gptq_with_identity_hessian_is_rounding(rows: int, rule: ScaleRule, act_order: bool):
    """Catches an error that leaks between columns with nothing in common; bitwise, over more than a lazy block."""
    weights = {"a": gaussian(rows, 144, seed=rows)}
    changes = {"scale_rule": rule, "act_order": act_order}
    gptq = solve_group(weights, torch.eye(144), settings(**changes))["a"]
    rounded = solve_group(weights, torch.eye(144), settings(method=Method.round_to_nearest, **changes))["a"]
    assert bits(gptq.weight) == bits(rounded.weight)
    assert (gptq.method, gptq.damping) == ("gptq", 0.01)
    assert (rounded.method, rounded.damping) == ("round_to_nearest", None)


def textbook_gptq(weight: Tensor, hessian: Tensor, quantized: NVFP4Tensor, damping: float, order: Tensor) -> Tensor:
    """Optimal brain surgery in float64: each step inverts the Hessian of the columns that are left."""
    w = weight.double().clone()
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    grid = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)]).double()
    step = quantized.block_scales.double().repeat_interleave(16, dim=1) * quantized.tensor_scale.double()
    result = torch.empty_like(w)
    for position, column in enumerate(order.tolist()):
        left = order[position:]
        inverse = torch.linalg.inv(h[left][:, left])
        nearest = grid[(w[:, column, None] / step[:, column, None] - grid).abs().argmin(dim=1)]
        result[:, column] = nearest * step[:, column]
        error = (w[:, column] - result[:, column]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
    return result


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("columns", [16, 48, 144])
@pytest.mark.parametrize("rows", ROWS)
def test_solver_is_the_textbook(rows: int, columns: int, ordered: bool):
    """Catches a wrong sign, factor or order, a lazy update that is lost or doubled, scales of the wrong column."""
    weight, hessian = gaussian(rows, columns, seed=rows), hessian_of(columns)
    tensor_scale = tensor_scale_for(weight.abs().max(), ScaleRule.sweep, power_of_two=True)
    scales = quantize_to_nvfp4(weight, tensor_scale, ScaleRule.sweep, ScaleError.mse).block_scales
    order = torch.argsort(hessian.diagonal(), descending=True) if ordered else torch.arange(columns)
    got = solve(weight, scales, tensor_scale, factorize(hessian, 0.01, order if ordered else None))
    expected = textbook_gptq(weight, hessian, got, 0.01, order)
    # A number within fp32 rounding of a midpoint may fall the other way, and changes its row from there on.
    is_same = (got.dequantize().double() == expected).all(dim=1)
    assert is_same.float().mean() >= 0.98


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("rule", list(ScaleRule))
def test_gptq_beats_rounding(rule: ScaleRule, act_order: bool):
    """Catches compensation in the wrong direction: on correlated inputs at least a fifth of the error must go."""
    weight, hessian = gaussian(64, 144, seed=3), hessian_of(144)
    changes = {"scale_rule": rule, "act_order": act_order}
    errors = {}
    for method in Method:
        solved = solve_group({"a": weight}, hessian, settings(method=method, **changes))["a"]
        errors[method] = output_error(weight, solved.weight, hessian)
        assert solved.relative_error == pytest.approx(errors[method], rel=1e-3)
    assert errors[Method.gptq] < 0.8 * errors[Method.round_to_nearest]


def test_order_and_diagonal_help():
    """Catches options that are read and not used: each must lower the output error on inputs of different size."""
    weight, hessian = gaussian(130, 144, seed=4), hessian_of(144)

    def error(**changes: object) -> float:
        return output_error(weight, solve_group({"a": weight}, hessian, settings(**changes))["a"].weight, hessian)

    best = error()
    assert error(refine_passes=1) < 0.97 * best
    assert best < error(act_order=False)
    assert best < error(scale_error=ScaleError.mse)
    assert best < error(scale_rule=ScaleRule.four_over_six) < error(scale_rule=ScaleRule.six)


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_columns_keep_their_rounded_weights(act_order: bool):
    """Catches weights of unseen inputs set to zero: other text may well reach them."""
    weight, hessian = gaussian(17, 48, seed=5), hessian_of(48)
    dead = torch.tensor([0, 17, 18, 47])
    hessian[dead], hessian[:, dead] = 0.0, 0.0
    solved = solve_group({"a": weight}, hessian, settings(act_order=act_order))["a"]
    tensor_scale = solved.weight.tensor_scale
    diagonal = damped_diagonal(hessian, 0.01)
    rounded = quantize_to_nvfp4(weight, tensor_scale, ScaleRule.sweep, ScaleError.hessian_diag, diagonal)
    assert torch.equal(solved.weight.dequantize()[:, dead], rounded.dequantize()[:, dead])
    assert not torch.equal(solved.weight.dequantize(), rounded.dequantize())


def test_input_that_is_always_zero():
    """Catches NaN from a Hessian of zeros: nothing can be compensated, so everything is rounded."""
    weights = {"a": gaussian(15, 32, seed=6)}
    gptq = solve_group(weights, torch.zeros(32, 32), settings())["a"]
    rounded = solve_group(weights, torch.zeros(32, 32), settings(method=Method.round_to_nearest))["a"]
    assert bits(gptq.weight) == bits(rounded.weight)
    assert gptq.relative_error == 0


def test_all_zero_weight():
    """Catches NaN scales or codes for a linear that was pruned away."""
    solved = solve_group({"a": torch.zeros(15, 32)}, hessian_of(32), settings())["a"]
    assert torch.equal(solved.weight.dequantize(), torch.zeros(15, 32))
    assert (solved.weight.block_scales.float() > 0).all()
    assert solved.relative_error == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_is_solved_together_and_handed_back_in_parts(dtype: torch.dtype):
    """Catches mixed-up rows, and fused members with different tensor scales, of which loaders keep only one."""
    weights = {"q": gaussian(17, 48, 7), "k": 5 * gaussian(1, 48, 8), "v": 0.1 * gaussian(15, 48, 9)}
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    hessian = hessian_of(48)
    solved = solve_group(weights, hessian, settings())
    assert list(solved) == ["q", "k", "v"]
    assert len({s.weight.tensor_scale.item() for s in solved.values()}) == 1
    for name, part in solved.items():
        assert part.weight.dequantize().shape == weights[name].shape
        assert part.relative_error == pytest.approx(output_error(weights[name], part.weight, hessian), rel=1e-3)
        assert part.relative_error < 0.02
        assert part.facts().keys() == {"method", "damping", "relative_error", "share_of_fours"}


def test_a_member_is_solved_as_if_alone():
    """Catches rows that influence each other: but for the shared tensor scale a row's result is its own."""
    weights = {"large": gaussian(17, 48, 10), "small": gaussian(15, 48, 11)}
    weights["small"][0, 0] = weights["large"].abs().max()  # both alone have the group's tensor scale
    weights["large"][0, 0] = weights["large"].abs().max()
    together = solve_group(weights, hessian_of(48), settings())
    for name, weight in weights.items():
        alone: Solved = solve_group({name: weight}, hessian_of(48), settings())[name]
        assert bits(alone.weight) == bits(together[name].weight)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("correction", [0.3, 1.0])
def test_target_is_the_least_squares_fit_to_the_sources_outputs(correction: float, act_order: bool):
    """Catches a drift taken the wrong way round, columns in the wrong order, another damping than the solve's."""
    weight, x = gaussian(17, 48, 13), gaussian(400, 48, 14) @ gaussian(48, 48, 15)
    y = x + 0.3 * gaussian(400, 48, 16) @ gaussian(48, 48, 17)
    hessian, drift = x.T @ x / 400, (y - x).T @ x / 400
    options = settings(correction=correction, act_order=act_order)
    solved = solve_group({"a": weight}, hessian, options, drift)["a"]
    # min |W Y - V X|^2 + damping |V - W|^2, as one least squares problem in float64
    strength = (0.01 * hessian.diagonal().mean() * 400).sqrt().double()
    inputs = torch.cat([x.double(), strength * torch.eye(48)])
    outputs = torch.cat([y.double(), strength * torch.eye(48)]) @ weight.double().T
    fitted = torch.linalg.lstsq(inputs, outputs).solution.T
    target = ((1 - correction) * weight.double() + correction * fitted).float()
    expected = solve_group({"a": target}, hessian, options)["a"]
    same = (solved.weight.dequantize() == expected.weight.dequantize()).float().mean()
    assert same > 0.99
    assert solved.weight.tensor_scale == expected.weight.tensor_scale


def test_correction_brings_outputs_nearer_to_the_sources():
    """Catches a correction that is computed and lost: the output error must fall by a third under a strong drift."""
    weight, x = gaussian(64, 144, 18), gaussian(2000, 144, 19)
    y = x + 0.3 * gaussian(2000, 144, 20) + 0.3 * x @ gaussian(144, 144, 21) / 12
    hessian, drift = x.T @ x / 2000, (y - x).T @ x / 2000

    def error(drift: Tensor | None) -> float:
        solved = solve_group({"a": weight}, hessian, settings(correction=1.0), drift)["a"]
        return (y @ weight.T - x @ solved.weight.dequantize().T).square().mean().item()

    assert error(drift) < 0.67 * error(None)


def test_hopeless_hessian_is_an_error():
    """Catches a silent fall back to rounding."""
    with pytest.raises(UserError, match="not positive definite"):
        solve_group({"a": gaussian(4, 16, 12)}, -torch.eye(16), settings())
