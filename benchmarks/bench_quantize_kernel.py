"""Time of the Triton NVFP4 quantizer beside the plain-torch truth, eager and through torch.compile, on one GPU.

    python benchmarks/bench_quantize_kernel.py [--markdown] [--no-compile] [--tune]

Before anything is timed, codes and block scales are compared with the truth's on the same device, bit for bit.
Times are medians of CUDA-graph replays over several weights that together exceed the L2 cache, tensor scale given:
the kernel alone, without the launch from Python. "of copy" is the rate of the bytes moved (weight read once, codes and
block scales written once) against that of a device-to-device copy in this run. torch.compile takes seconds to compile,
so it is timed on the first shape for six and for four_over_six with mse. The authors' package `fouroversix` joins if it
is installed and the GPU has the E2M1 conversion that its Triton kernel needs (Blackwell); its time includes the pass
that finds the largest weight.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
from torch import Tensor

from soar_prep.fouroversix import tensor as truth
from soar_prep.fouroversix import triton_quantize
from soar_prep.fouroversix.blocks import BLOCK, tensor_scale_for
from soar_prep.settings import ScaleError, ScaleRule

SHAPES = ((4096, 16384), (4096, 4096))
COLD_BYTES = 512 * 2**20  # of weights in one replay, several times the largest L2
PEER_RULES = {"six": "static_6", "mse": "mse", "mae": "mae", "abs_max": "abs_max"}
TILES = ((32, 1), (64, 1), (64, 2), (128, 4), (256, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print nothing but the table")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile of the truth")
    parser.add_argument("--tune", action="store_true", help="time the kernel by tile and warps instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device; this benchmark times a GPU kernel")
    say = (lambda line: None) if options.markdown else print
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    check_bits(say)
    copy_rate = measure_copy()
    say(f"device copy: {copy_rate / 1e12:.2f} TB/s read and written")
    if options.tune:
        return print_tiles()
    print("| shape | rule | error | tensor scale | us | MB | of copy | truth us | torch.compile us | fouroversix us |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for rule, error, power_of_two in cases():
            wants_compile = shape == SHAPES[0] and rule is not ScaleRule.sweep and error is ScaleError.mse
            row = measure(shape, rule, error, power_of_two, wants_compile and power_of_two and not options.no_compile)
            print(format_row(shape, rule, error, power_of_two, row, copy_rate), flush=True)


def cases() -> list[tuple[ScaleRule, ScaleError, bool]]:
    """Rule, error and whether the tensor scale is a power of two. Six has no error to choose by."""
    fixed = [(ScaleRule.six, ScaleError.mse, True), (ScaleRule.six, ScaleError.mse, False)]
    adaptive = [(rule, e, True) for rule in (ScaleRule.four_over_six, ScaleRule.sweep) for e in ScaleError]
    return [*fixed, (ScaleRule.four_over_six, ScaleError.mse, False), *adaptive]


def check_bits(say: Callable[[str], None]) -> None:
    """Stop unless the kernel gives the truth's bits on this device, for every case, on 2^20 blocks with tiny rows."""
    weight, column_weights = make_weights((4096, 4096), 1)[0], make_column_weights(4096)
    weight[::97] *= 2.0**-14
    weight[::101] = 0
    for rule, error, power_of_two in cases():
        tensor_scale = tensor_scale_for(weight.float().abs().max(), rule, power_of_two)
        arguments = weight, tensor_scale, rule, error, column_weights
        found, expected = triton_quantize.quantize_to_nvfp4(*arguments), truth.quantize_to_nvfp4(*arguments)
        scales = (found.block_scales.view(torch.uint8) != expected.block_scales.view(torch.uint8)).sum().item()
        codes = (found.codes != expected.codes).sum().item()
        if scales or codes:
            case = f"{rule.name}, {error.name}, power_of_two={power_of_two}"
            sys.exit(f"{case}: {scales} block scales and {codes} code bytes differ from the truth's")
    say(f"bits: equal to the truth's on this device in {len(cases())} cases of {weight.numel() // BLOCK} blocks")


def make_weights(shape: tuple[int, int], count: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [(0.02 * torch.randn(shape, device="cuda", generator=generator)).bfloat16() for _ in range(count)]


def make_column_weights(columns: int) -> Tensor:
    return torch.rand(columns, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) ** 4


def measure(
    shape: tuple[int, int], rule: ScaleRule, error: ScaleError, power_of_two: bool, wants_compile: bool
) -> dict[str, float | None]:
    """Median microseconds a weight: of ours, the truth, the compiled truth and the authors' package."""
    weights = make_weights(shape, -(-COLD_BYTES // (2 * shape[0] * shape[1])))
    tensor_scale = tensor_scale_for(weights[0].float().abs().max(), rule, power_of_two)
    rest = tensor_scale, rule, error, make_column_weights(shape[1])
    ours = [partial(triton_quantize.quantize_to_nvfp4, weight, *rest) for weight in weights]
    row: dict[str, float | None] = {"ours": time_graph(ours), "compiled": None, "peer": None}
    row["truth"] = time_calls(partial(truth.quantize_to_nvfp4, weights[0], *rest))
    if wants_compile:
        compiled = torch.compile(truth.quantize_to_nvfp4)
        row["compiled"] = time_graph([partial(compiled, weight, *rest) for weight in weights])
    peer_rule = PEER_RULES.get(rule.name if rule is ScaleRule.six else error.name)
    if power_of_two and rule is not ScaleRule.sweep and peer_rule and has_peer():
        from fouroversix import QuantizationConfig, quantize_to_fp4

        config = QuantizationConfig(backend="triton", scale_rule=peer_rule)
        row["peer"] = time_calls(partial(quantize_to_fp4, weights[0], config))
    return row


def has_peer() -> bool:
    return importlib.util.find_spec("fouroversix") is not None and torch.cuda.get_device_capability()[0] >= 10


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median microseconds a call, all of them captured in one CUDA graph."""
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # kept: outputs in reused memory would stay in the L2 cache
    microseconds = time_calls(graph.replay, repeats) / len(calls)
    del results
    return microseconds


def time_calls(call: Callable[[], object], repeats: int = 5) -> float:
    """Median microseconds of a call whose work outlasts its launch."""
    call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def measure_copy() -> float:
    """Bytes a second, read and written, of a device-to-device copy of four times COLD_BYTES.

    Not from a CUDA graph: replayed from one on an H200, copies came out at 2.7 TB/s, below the kernel's own rate.
    """
    source = torch.zeros(4 * COLD_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_calls(partial(target.copy_, source)) * 1e-6)


def format_row(
    shape: tuple[int, int], rule: ScaleRule, error: ScaleError, power_of_two: bool, row: dict, copy_rate: float
) -> str:
    weights = shape[0] * shape[1]
    moved = weights * 2 + weights // 2 + weights // BLOCK
    share = moved / (row["ours"] * 1e-6) / copy_rate
    others = (f"{row[name]:.0f}" if row[name] else "" for name in ("truth", "compiled", "peer"))
    name = "-" if rule is ScaleRule.six else error.name
    scale = "2^n" if power_of_two else "any"
    cells = (f"{list(shape)}", rule.name, name, scale, f"{row['ours']:.1f}", f"{moved / 1e6:.0f}", f"{share:.0%}")
    return "| " + " | ".join([*cells, *others]) + " |"


def print_tiles() -> None:
    """Kernel time by blocks a tile and warps a program."""
    print("| shape | rule | " + " | ".join(f"{tile} x {warps} us" for tile, warps in TILES) + " |")
    print("|---|---|" + "---|" * len(TILES))
    for shape in SHAPES:
        weights = make_weights(shape, -(-COLD_BYTES // (2 * shape[0] * shape[1])))
        for rule in (ScaleRule.six, ScaleRule.four_over_six):
            tensor_scale = tensor_scale_for(weights[0].float().abs().max(), rule, True)
            rest = tensor_scale, rule, ScaleError.mse, None
            times = []
            for tile, warps in TILES:
                launches = [partial(triton_quantize.launch, w, *rest, tile, warps) for w in weights]
                times.append(f"{time_graph(launches):.1f}")
            print(f"| {list(shape)} | {rule.name} | " + " | ".join(times) + " |", flush=True)


if __name__ == "__main__":
    main()
