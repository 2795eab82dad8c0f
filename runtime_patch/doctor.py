"""python -m runtime_patch.doctor: the versions here, and each feature of the patch: on, off or impossible, and why."""

import os

from runtime_patch.features import FEATURES, TESTED, check_version, chosen, state_lines, this_machine
from soar_prep.errors import UserError


def main() -> int:
    """0 if a server would start patched as SOAR_PATCH asks now, 2 if not."""
    machine = this_machine()
    for name, value in (("sglang", machine.sglang), ("torch", machine.torch), ("flashinfer", machine.flashinfer)):
        print(f"{name:14}{value or 'not installed'}" + (f" (tested: {', '.join(TESTED)})" if name == "sglang" else ""))
    capability = "" if machine.capability is None else f" (sm_{''.join(map(str, machine.capability))})"
    print(f"{'GPU':14}{machine.gpu or 'none'}{capability}")
    asked = os.environ.get("SOAR_PATCH", "0")
    print(f"{'SOAR_PATCH':14}{asked}\n")
    try:
        names = [] if asked in ("", "0") else [feature.name for feature in chosen(asked, machine)]
        print(*state_lines(machine, names), sep="\n")
        check_version(machine, os.environ.get("SOAR_PATCH_ANY_SGLANG") == "1")
    except UserError as error:
        print(f"runtime_patch: {error}")
        return 2
    if not names:
        print(f"\nNothing is patched. SOAR_PATCH=1 switches on all that is possible; or name of {names_of_all()}.")
    return 0


def names_of_all() -> str:
    return ", ".join(feature.name for feature in FEATURES)


if __name__ == "__main__":
    raise SystemExit(main())
