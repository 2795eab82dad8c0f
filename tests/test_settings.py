from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import pytest

from soar_prep.errors import UserError
from soar_prep.settings import (
    REQUIRED,
    Capture,
    Quantize,
    Selftest,
    TrainDraft,
    Verify,
    check_ranges,
    manual,
    option_names,
    range_text,
)

COMMANDS = [Quantize, Verify, TrainDraft, Capture, Selftest]


def leaves(settings: type, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (field, default) of every option that is no group."""
    found: dict[str, tuple[Any, Any]] = {}
    for f in fields(settings):
        default = f.default if f.default is not MISSING else f.default_factory()  # type: ignore[misc, operator]
        if is_dataclass(default):
            found |= leaves(type(default), f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = (f, default)
    return found


def build(settings: type, **changes: Any) -> Any:
    """Settings with everything required filled in; `changes` by dotted name."""
    required = {name: "x" for name, (_, default) in leaves(settings).items() if default == REQUIRED}
    made = settings(**required)
    for name, value in changes.items():
        *groups, own = name.split(".")
        target = made
        for group in groups:
            target = getattr(target, group)
        setattr(target, own, value)
    return made


@pytest.mark.parametrize("settings", COMMANDS)
def test_manual_tells_every_option(settings: type):
    """Catches an option that --help hides, or whose default, range, choices or meaning it leaves out."""
    text = manual(settings)
    for name, (f, default) in leaves(settings).items():
        shown = {REQUIRED: "required", None: "none"}.get(default if default in (REQUIRED, None) else "")
        shown = shown or (default.value if isinstance(default, Enum) else str(default))
        allowed = ", ".join(e.value for e in type(default)) if isinstance(default, Enum) else range_text(f)
        line = f"  {name}={shown}" + (f"   [{allowed}]" if allowed else "")
        assert f"{line}\n      {f.metadata['text']}" in text
        assert len(f.metadata["text"]) > 5
    assert set(leaves(settings)) <= set(option_names(settings))


@pytest.mark.parametrize("settings", COMMANDS)
def test_defaults_are_in_range(settings: type):
    """Catches a default that the program itself would refuse."""
    check_ranges(build(settings))


NUMBERS = [(settings, name, f) for settings in COMMANDS for name, (f, _) in leaves(settings).items() if range_text(f)]


@pytest.mark.parametrize(("settings", "name", "f"), NUMBERS, ids=[f"{s.__name__}-{name}" for s, name, _ in NUMBERS])
def test_values_out_of_range_are_refused(settings: type, name: str, f: Any):
    """Catches a range that is told and not kept, a bound that is off by one, NaN, and a message without the group."""
    low, high = f.metadata["low"], f.metadata["high"]
    for good in (low, high):
        if good is not None:
            check_ranges(build(settings, **{name: good}))
    for bad in (low - 1e-9, float("nan"), *([] if high is None else [high + 1e-9])):
        with pytest.raises(UserError, match=rf"^{name}={bad}: expected {range_text(f)}; see --help$"):
            check_ranges(build(settings, **{name: bad}))


def test_options_without_a_value_are_in_range():
    """Catches a comparison with None."""
    check_ranges(build(Quantize, **{"gate.max_kl": None, "compute.threads": None}))
