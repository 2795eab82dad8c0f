import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "soar_prep"
# Reading order: a module imports only from earlier groups, or from its own package.
ORDER = [
    ["errors", "processes"],
    ["settings"],
    ["fouroversix"],
    ["layouts"],
    ["qat"],
    ["checkpoint", "text", "report", "page", "sala"],
    ["streaming"],
    ["quality"],
    ["gptq", "eagle3", "verify", "selftest"],
    ["cli"],
]
RANK = {name: rank for rank, group in enumerate(ORDER) for name in group}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


def imported(path: Path) -> set[str]:
    """Names of the soar_prep modules that a file imports, anywhere in it: `gptq.solve` for soar_prep.gptq.solve."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
    return {name.removeprefix("soar_prep.") for name in names if name.split(".")[0] == "soar_prep"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path):
    """Catches a cycle, or mathematics that knows of the command line: what is read first depends on nothing later."""
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in RANK, f"{path}: give it a place in ORDER"
    for name in imported(path):
        other = name.split(".")[0]
        assert other == own or RANK[other] < RANK[own], f"{path} imports soar_prep.{name}"


def test_order_of_the_number_format():
    """Catches a cycle within the format: e2m1, blocks, tensor, kernels."""
    order = ["e2m1", "blocks", "tensor", "triton_quantize", "quantizer"]
    for place, name in enumerate(order):
        path = PACKAGE / "fouroversix" / f"{name}.py"
        if path.exists():
            inside = {n.removeprefix("fouroversix.") for n in imported(path) if n.startswith("fouroversix.")}
            assert inside <= set(order[:place])


def test_order_of_the_product():
    """Catches a truth that knows of its kernels, and a kernel that picks another one."""
    order = ["gemm", "triton_gemm", "native", "product"]
    for place, name in enumerate(order):
        inside = {n.removeprefix("qat.") for n in imported(PACKAGE / "qat" / f"{name}.py") if n.startswith("qat.")}
        assert inside <= set(order[:place])


def test_the_patch_imports_the_format_and_the_checks_alone():
    """Catches a server that drags in the toolchain, and a toolchain that knows of the server."""
    allowed = {"errors", "fouroversix", "layouts", "qat", "checkpoint", "verify"}
    for path in (PACKAGE.parent / "runtime_patch").rglob("*.py"):
        assert {name.split(".")[0] for name in imported(path)} <= allowed, path
    for path in MODULES:
        assert "runtime_patch" not in path.read_text(), path


LIGHT = {
    "runtime_patch": ["torch", "transformers", "hydra", "numpy", "wandb", "datasets", "accelerate", "safetensors"],
    "runtime_patch.hooks": ["torch", "transformers", "hydra", "wandb", "datasets", "accelerate"],
    "runtime_patch.launch": ["transformers", "hydra", "wandb", "datasets", "accelerate"],
    "soar_prep": ["torch", "transformers", "hydra", "numpy", "wandb", "datasets", "accelerate", "safetensors"],
    "soar_prep.settings": ["torch", "transformers", "hydra", "numpy"],
    "soar_prep.cli": ["torch", "transformers", "numpy", "wandb", "datasets"],
    "soar_prep.fouroversix.tensor": ["transformers", "hydra", "wandb", "datasets", "accelerate"],
    "soar_prep.layouts": ["transformers", "hydra", "wandb", "datasets", "accelerate"],
    "soar_prep.checkpoint": ["transformers", "hydra", "wandb", "datasets", "accelerate"],
    "soar_prep.selftest": ["transformers", "hydra", "wandb", "datasets", "accelerate"],
    "soar_prep.verify": ["transformers", "hydra", "wandb", "datasets", "accelerate"],
    "soar_prep.gptq.quantize": ["hydra", "wandb", "datasets"],
}


@pytest.mark.parametrize("module", LIGHT)
def test_heavy_packages_are_not_imported(module: str):
    """Catches --help that takes five seconds, and a server that needs transformers to read an NVFP4 tensor."""
    code = f"import sys, {module}; print([name for name in {LIGHT[module]} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
