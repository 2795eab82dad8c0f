import pytest

from runtime_patch import features, hooks
from runtime_patch.hooks import HOOKS, Hook
from soar_prep.errors import UserError


class Server:
    def multiply(self, x: int, by: int = 2) -> int:
        return x * by

    def other(self, x: int) -> int:
        return x


class Child(Server):
    pass


def add_one(original, server, x, by=2):
    return original(server, x, by) + 1


def of_old(original, server, x, times=2):
    return original(server, x, times)


def hook(method: str = "multiply", replacement: str = "add_one", owner: str = "Server") -> Hook:
    return Hook("nvfp4", f"{__name__}:{owner}.{method}", f"{__name__}:{replacement}", "a test")


@pytest.fixture(autouse=True)
def own_again():
    yield
    hooks.disable()


def test_in_and_out_again():
    """Catches a hook that loses arguments, and an original that does not come back."""
    original = Server.__dict__["multiply"]
    hooks.put_in(hook())
    assert Server().multiply(3) == 7
    assert Server().multiply(3, by=4) == 13
    assert Child().multiply(3) == 7
    hooks.disable()
    assert Server.__dict__["multiply"] is original
    assert Server().multiply(3) == 6


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (hook(replacement="of_old"), r"takes \['self', 'x', 'by'\] in this SGLang; the patch was made for"),
        (hook("divide"), "Server.divide: not in this SGLang"),
        (hook(owner="Worker"), "Worker.multiply: not in this SGLang"),
        (hook(owner="Child"), "Child.multiply: not in this SGLang"),  # or the parent's would be put into the child
    ],
    ids=["parameters", "method", "class", "inherited"],
)
def test_another_sglang(wrong: Hook, words: str):
    """Catches a method that is called with what it does not take, or that nothing calls any more."""
    with pytest.raises(UserError, match=words):
        hooks.put_in(wrong)
    assert Server().multiply(3) == 6


def test_all_or_nothing(monkeypatch: pytest.MonkeyPatch):
    """Catches an SGLang left half patched, and one that starts unpatched because its plugins may not fail."""
    monkeypatch.setattr(hooks, "HOOKS", (hook(), hook("divide")))
    monkeypatch.setattr(hooks, "check_version", lambda machine, any_version: None)
    with pytest.raises(SystemExit, match=r"runtime_patch: .*divide: not in this SGLang"):
        hooks.enable("nvfp4")
    assert Server().multiply(3) == 6
    monkeypatch.setattr(hooks, "HOOKS", (hook(),))
    assert hooks.enable("nvfp4") == hooks.enable("nvfp4") == ["nvfp4"]  # once, though SGLang may load plugins twice
    assert Server().multiply(3) == 7


def test_without_sglang():
    """Catches a plugin that dies of an import error where it should name what is missing."""
    if features.installed("sglang"):
        pytest.skip("SGLang is installed here")
    with pytest.raises(SystemExit, match="SGLang is not installed"):
        hooks.enable()


def test_the_table():
    """Catches a hook of no feature, a feature without a hook, and two hooks that fight for one place."""
    assert {entry.feature for entry in HOOKS} == {feature.name for feature in features.FEATURES}
    assert len({entry.target for entry in HOOKS}) == len(HOOKS)
    assert all(entry.reason and entry.replacement.startswith("runtime_patch.") for entry in HOOKS)
