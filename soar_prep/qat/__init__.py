"""Quantization-aware training: the draft learns under the very numbers that will serve, in reading order.

gemm.py             y = x W^T on codes and scales, the truth that everything here must equal
"""
