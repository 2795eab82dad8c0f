"""The thin patch with which SGLang serves what soar-prep writes.

launch.py    python -m runtime_patch.launch: checks the artifacts, says what it switches on, starts the server
doctor.py    python -m runtime_patch.doctor: what this machine can run, and why not the rest
features.py  what the patch can do, and on what machine
hooks.py     what it replaces in SGLang for that, in one table; and puts back
kernels/     each with its plain-torch truth

SGLang calls `register` in each of its processes as soon as this package is installed. It does nothing, in microseconds,
unless SOAR_PATCH asks for it: 1 for all that the machine can, or names of features with commas.
"""

import os


def register() -> None:
    """SGLang's plugin (entry point group sglang.srt.plugins)."""
    asked = os.environ.get("SOAR_PATCH", "")
    if asked not in ("", "0"):
        from runtime_patch.hooks import enable

        enable(asked)
