"""Stands in for sgl_kernel, SGLang's compiled kernels: the published ones are for CUDA.

SGLang imports names from it, and on a CPU without AMX kernels computes in plain torch what this test needs.
"""

from inert import make_inert

make_inert(__name__, "0.0.0")
