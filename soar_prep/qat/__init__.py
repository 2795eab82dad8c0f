"""Quantization-aware training: the draft learns under the very numbers that will serve, in reading order.

gemm.py             y = x W^T on codes and scales, the truth that everything here must equal
triton_gemm.py      the same on a GPU's BF16 tensor cores, exact
native.py           the same on FP4 units
product.py          which of the three runs where
linear.py           linear layers that are trained through what will serve
"""
