"""MiniCPM-SALA's two kinds of attention at the published shapes, beside plain torch and peers, on one GPU.

    python benchmarks/bench_sala_kernels.py [lightning] [sparse]

lightning: 32 heads of 128, BF16; peer: flash-linear-attention's chunk_simple_gla, if it is installed. limit: q, k, v
and o once through memory at 4.3 TB/s (forward), and 7 more of their size for the gradients. sparse: 32 query and 2
key-value heads of 128, BF16, 96 blocks of 64; beside dense causal attention by torch's flash kernel. Medians of
triton's do_bench.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from soar_prep.report import environment
from soar_prep.sala import infllm, lightning, triton_infllm, triton_lightning
from soar_prep.sala.configuration import SparseAttention

HEADS, KV_HEADS, WIDTH = 32, 2, 128
BANDWIDTH = 4.3e12  # bytes a second, of a large copy on an H200


def drawn(*heads: int, tokens: int) -> list[Tensor]:
    shapes = [(1, tokens, n, WIDTH) for n in heads]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for s in shapes]


def milliseconds(function: Callable[[], Any]) -> float:
    return triton.testing.do_bench(function, warmup=20, rep=120, return_mode="median")


def with_gradients(function: Callable[..., Any], leaves: list[Tensor], gradient: Tensor) -> Callable[[], Any]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


def bench_lightning() -> None:
    slopes = lightning.slopes(HEADS, "cuda")
    contenders = {
        "soar-prep": lambda q, k, v: triton_lightning.by_chunks(q, k, v, slopes)[0],
        "plain torch": lambda q, k, v: lightning.by_chunks(q, k, v, slopes)[0],
    }
    if peer := simple_gla(slopes):
        contenders["simple_gla"] = peer
    print(f"| tokens | | {' | '.join(contenders)} | limit |\n|{'---|' * (len(contenders) + 3)}")
    for tokens in (65536, 8192, 2048):  # the longest first: the peer tunes itself once, to the first that it sees
        q, k, v, do = drawn(*[HEADS] * 4, tokens=tokens)
        limit = q.numel() * 2 / BANDWIDTH * 1e3
        for name, passes, calls in (
            ("forward", 4, [partial(f, q, k, v) for f in contenders.values()]),
            ("with gradients", 11, [with_gradients(f, [q, k, v], do) for f in contenders.values()]),
        ):
            times = " | ".join(f"{milliseconds(call):.2f} ms" for call in calls)
            print(f"| {tokens} | {name} | {times} | {passes * limit:.2f} ms |", flush=True)
    q, k, v = (x[:, :, :512] for x in (q, k, v))
    exact = lightning.by_recurrence(q.double(), k.double(), v.double(), slopes.double())[0]
    for name, function in contenders.items():
        print(f"{name}: relative error {(function(q, k, v).double() - exact).norm() / exact.norm():.1e}")


def simple_gla(slopes: Tensor) -> Callable[..., Tensor] | None:
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        print(f"flash-linear-attention is not there ({error})")
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layout = [x.transpose(1, 2) for x in (q, k, v)]  # its own: tokens before heads
        return chunk_simple_gla(*layout, g_gamma=-slopes)[0].transpose(1, 2)

    return run


def bench_sparse() -> None:
    sparse = SparseAttention()
    print("| tokens | choice | attention to it | both | dense, flash | GPU memory |\n|---|---|---|---|---|---|")
    for tokens in (8192, 16384, 65536):
        q, k, v = (x[0] for x in drawn(HEADS, KV_HEADS, KV_HEADS, tokens=tokens))

        def choose(q: Tensor = q, k: Tensor = k, tokens: int = tokens) -> list[Any]:
            pooled, piece = infllm.pool_levels(k, sparse), triton_infllm.PIECE
            starts = range(0, tokens, piece)
            return [triton_infllm.choose(q[:, s : s + piece], pooled, s, tokens, sparse, 0) for s in starts]

        def both(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return triton_infllm.sparse_attention(q, k, v, sparse, False)

        def dense(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        both()
        memory = (torch.cuda.max_memory_allocated() - held) / 2**30
        chosen, all_of_it, whole = (milliseconds(f) for f in (choose, both, dense))
        print(
            f"| {tokens} | {chosen:.2f} ms | {all_of_it - chosen:.2f} ms | {all_of_it:.2f} ms | {whole:.2f} ms | "
            f"{memory:.2f} GiB |",
            flush=True,
        )
        if tokens == 8192:
            do = torch.randn_like(q)
            times = [milliseconds(with_gradients(f, [q, k, v], g)) for f, g in ((both, do), (dense, do[None]))]
            print(f"| {tokens}, with gradients | | | {times[0]:.2f} ms | {times[1]:.2f} ms | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"lightning": bench_lightning, "sparse": bench_sparse}
    parser.add_argument("parts", nargs="*", metavar="part", help="lightning, sparse; both if not given")
    chosen = parser.parse_args().parts or list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(parts)}")
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    facts = environment(torch.device("cuda"))
    print(f"{facts['device']}, torch {torch.__version__}, triton {triton.__version__}")
    for part in chosen:
        print(f"\n{part}\n")
        parts[part]()


if __name__ == "__main__":
    main()
