"""NVFP4 with FourOverSix block scales: the number format, in reading order.

e2m1.py             the sixteen values: rounding, codes, two codes a byte
blocks.py           block scales: which E4M3 code serves a block of sixteen best
tensor.py           NVFP4Tensor (codes, block scales, tensor scale) and back to floats
triton_quantize.py  the same on a GPU, bit for bit
quantizer.py        which of the two runs where

Sources: OCP Microscaling Formats v1.0 (E2M1), OCP OFP8 (E4M3), "Four Over Six" (Cook et al., 2025).
"""
