"""Stands in for sgl_kernel, SGLang's compiled kernels: the published ones are for CUDA.

SGLang takes some CPU operators from it while it imports, so these are declared; none runs. For what this test computes
SGLang has plain torch, which it uses on a CPU unless this package brings kernels for AMX.
"""

import torch
from inert import make_inert

make_inert(__name__, "0.0.0")
library = torch.library.Library("sgl_kernel", "DEF")
