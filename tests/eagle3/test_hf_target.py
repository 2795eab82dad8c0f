import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import NEEDS_GPU
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from soar_prep.eagle3.decode import Speculation, Target, Tree, Verified, judge, path_to
from soar_prep.eagle3.hf_target import (
    PathTarget,
    Reader,
    RerunTarget,
    TreeTarget,
    attention_windows,
    decoding_target,
    fork,
)
from soar_prep.errors import UserError

ATTENTION = [
    *("llama", "qwen2", "qwen2_window", "qwen3", "mistral", "smollm3", "gemma2", "gemma3", "odd_width"),
    *("granite", "phi3", "cohere2", "opt"),
]
KINDS: dict[str, type] = dict.fromkeys(ATTENTION, TreeTarget) | {
    "lfm2": PathTarget,
    "recurrent": PathTarget,
    "remote_code": RerunTarget,
}
Models = Callable[[str], PreTrainedModel]


class RecurrentConfig(PretrainedConfig):
    model_type = "toy_recurrent"
    num_hidden_layers = 2
    vocab_size = 300


class RecurrentLayer(nn.Module):
    """state <- 0.9 state + v k^T in place, read by q; `clumsy` forgets its state when given several tokens, as
    models do whose cache is written for one token at a time."""

    def __init__(self, clumsy: bool):
        super().__init__()
        self.clumsy = clumsy
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, hidden: Tensor, state: Tensor) -> Tensor:
        if self.clumsy and hidden.shape[1] > 1:
            state.zero_()
        rows = []
        for x in hidden[0]:
            state.mul_(0.9).add_(torch.outer(self.v(x), self.k(x)))
            rows.append(x + torch.tanh(state @ self.q(x)))
        return torch.stack(rows)[None]


class RecurrentLM(PreTrainedModel):
    """A model with a cache of its own, changed in place: a list of matrices."""

    config_class = RecurrentConfig

    def __init__(self, clumsy: bool = False):
        super().__init__(RecurrentConfig())
        self.embed, self.head = nn.Embedding(300, 16), nn.Linear(16, 300, bias=False)
        self.layers = nn.ModuleList([RecurrentLayer(clumsy) for _ in range(2)])
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        states = [torch.zeros(16, 16) for _ in range(2)] if past_key_values is None else past_key_values
        hidden = self.embed(input_ids)
        for layer, state in zip(self.layers, states, strict=True):
            hidden = layer(hidden, state)
        return SimpleNamespace(logits=self.head(hidden), past_key_values=states if use_cache else None)


@pytest.fixture(scope="module")
def models(model_directory: Callable[[str], Path]) -> Models:
    @functools.cache
    def load(name: str) -> PreTrainedModel:
        if name == "recurrent":
            return RecurrentLM().eval()
        directory = model_directory(name)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True).eval()

    return load


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(one: Verified, two: Verified) -> None:
    torch.testing.assert_close(one.logits, two.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.aux, two.aux, rtol=1e-4, atol=1e-4)


def greedy_by_trees(target: Target, prompt: Sequence[int], text: Sequence[int], seed: int) -> list[int]:
    """The target's greedy output; every round's tree holds `text` to some depth, among guesses that are wrong."""
    chance = random.Random(seed)
    tokens = [int(target.start(prompt).logits[-1].argmax())]
    while len(tokens) < len(text):
        nodes, parents, right = [tokens[-1]], [-1], 0
        for token in text[len(tokens) : len(tokens) + chance.randrange(6)]:
            for _ in range(chance.randrange(3)):
                nodes.append((token + 1 + chance.randrange(299)) % 300)
                parents.append(chance.choice([right, chance.randrange(len(parents))]))
            nodes.append(token)
            parents.append(right)
            right = len(nodes) - 1
        logits = target.verify(nodes, parents).logits
        path, bonus = judge(Tree(nodes, parents, []), logits, Speculation(), torch.Generator())
        target.accept(path)
        tokens += [*(nodes[n] for n in path[1:]), bonus]
    return tokens[: len(text)]


@pytest.mark.parametrize("name", KINDS)
def test_reads_as_the_truth_does(name: str, models: Models):
    """Catches siblings that see each other, a position by row instead of depth, a window counted in rows, a cache
    that keeps rejected nodes, those of a tree that was never accepted, or the last prompt; and the wrong kind chosen.

    The windows of 8 are left behind at once; fp32, other shapes sum in another order."""
    model, tokens = models(name), some_tokens(60)
    target, truth = decoding_target(model, (0, 1)), RerunTarget(model, (0, 1), exact=False)
    assert type(target) is KINDS[name]
    target.start(tokens[40:])
    target.verify(tokens[:3], [-1, 0, 0])
    for step in (
        lambda kind: kind.start(tokens[:11]),
        lambda kind: kind.verify(tokens[11:19], [-1, 0, 0, 1, 2, 2, 4, 6]),
        lambda kind: kind.accept([0, 2, 4, 6, 7]),
        lambda kind: kind.verify(tokens[19:24], [-1, 0, 0, 1, 3]),
        lambda kind: kind.verify(tokens[20:25], [-1, 0, 1, 2, 3]),
        lambda kind: kind.accept([0, 1, 2]),
        lambda kind: kind.verify(tokens[30:45], range(-1, 14)),
        lambda kind: kind.accept(range(15)),
        lambda kind: kind.verify(tokens[5:6], [-1]),
        lambda kind: kind.accept([0]),
        lambda kind: kind.verify(tokens[50:54], [-1, 0, 1, 1]),
    ):
        found, expected = step(target), step(truth)
        if expected is not None:
            assert_same(found, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "lfm2", "recurrent"])
def test_greedy_is_that_of_generate(name: str, models: Models):
    """Catches a state that is not rolled back to the accepted path: the text drifts from transformers' own."""
    model, prompt = models(name), some_tokens(5, seed=1)
    truth, text = RerunTarget(model, (0, 1)), list(prompt)
    for _ in range(40):
        text.append(int(truth.start(text).logits[-1].argmax()))
    text = text[5:]
    assert len(set(text)) > 3
    if name != "recurrent":
        end = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert model.generate(torch.tensor([prompt]), max_new_tokens=40, **end)[0, 5:].tolist() == text
    target = decoding_target(model, (0, 1))
    for seed in range(3):
        assert greedy_by_trees(target, prompt, text, seed) == text


def test_eager_attention(models: Models, model_directory: Callable[[str], Path]):
    """Catches a mask of a form that only sdpa takes: eager adds it to the scores."""
    directory = model_directory("qwen2_window")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    target, truth = decoding_target(model, (0,)), RerunTarget(models("qwen2_window"), (0,), exact=False)
    assert type(target) is TreeTarget
    tokens, parents = some_tokens(20), [-1, 0, 0, 1, 2]
    target.start(tokens[:15])
    truth.start(tokens[:15])
    assert_same(target.verify(tokens[15:], parents), truth.verify(tokens[15:], parents))


def test_bf16(model_directory: Callable[[str], Path]):
    """Catches a mask of another dtype than the model's, which sdpa refuses."""
    model = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.bfloat16).eval()
    assert type(decoding_target(model, (0,))) is TreeTarget


def test_bf16_is_exact(model_directory: Callable[[str], Path]):
    """Catches a pass of another shape than token-by-token decoding has: in BF16 logits tie, and rounding decides."""
    model = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.bfloat16).eval()
    target, tokens, parents = RerunTarget(model, (0, 1, 2)), [5, 8, 9, 10], [-1, 0, 0, 2]
    target.start([3, 4])
    verified = target.verify(tokens, parents)
    for node in range(4):
        text = [3, 4, *(tokens[n] for n in path_to(node, parents))]
        with torch.no_grad():
            output = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        assert torch.equal(verified.logits[node], output.logits[0, -1].float())
        hidden = torch.cat([output.hidden_states[1][0, -1], output.hidden_states[2][0, -1]])
        assert torch.equal(verified.aux[node, : 2 * 64], hidden)
    target.accept([0, 2])
    assert target.context == [3, 4, 5, 9]


def test_a_cache_for_single_tokens_is_not_trusted():
    """Catches a model that reads several tokens after its cache wrongly: what it says would be believed."""
    assert type(decoding_target(RecurrentLM(clumsy=True).eval(), (0, 1))) is RerunTarget


def test_a_model_that_ignores_masks(model_directory: Callable[[str], Path]):
    """Catches a tree that is read as a chain: such a model is read path by path."""
    model = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32).eval()
    forward = model.forward

    @functools.wraps(forward)
    def deaf(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = deaf
    assert type(decoding_target(model, (0,))) is PathTarget


@pytest.mark.parametrize(
    ("layers", "types", "windows"),
    [
        ([DynamicLayer(), DynamicSlidingWindowLayer(8)], ["full_attention", "sliding_attention"], [None, 8]),
        ([DynamicSlidingWindowLayer(8), DynamicSlidingWindowLayer(8)], None, [8, 8]),
        ([DynamicLayer(), DynamicSlidingWindowLayer(8)], None, None),
        ([DynamicLayer(), DynamicSlidingWindowLayer(8)], ["sliding_attention", "full_attention"], None),
        ([DynamicLayer(), DynamicSlidingWindowLayer(8)], ["full_attention", "chunked_attention"], None),
        ([DynamicSlidingWindowLayer(4), DynamicSlidingWindowLayer(4)], None, None),
        ([DynamicLayer(), LinearAttentionLayer()], ["full_attention", "linear_attention"], None),
        ([DynamicLayer()], None, None),
    ],
)
def test_masks_only_where_they_can_say_it(layers: list, types: Any, windows: Any, model_directory: Any):
    """Catches a tree mask for layers that see by chunks, by a window of unknown size, by a state, or in an unknown
    order: the short trial in decoding_target would not show it."""
    model = AutoModelForCausalLM.from_pretrained(model_directory("mistral"), dtype=torch.float32)
    model.config.layer_types = types
    cache = DynamicCache()
    cache.layers = layers
    assert attention_windows(Reader(model, (0,)), cache) == windows


def test_nan_is_told(model_directory: Callable[[str], Path]):
    """Catches a broken checkpoint that a comparison with NaN would pass; decode() raises on what is then read."""
    model = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32).eval()
    model.lm_head.weight.data[3] = torch.nan
    target = decoding_target(model, (0,))
    assert type(target) is RerunTarget
    assert target.start([5, 6]).logits.isnan().any()


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_prompt_gives_one_row_of_logits(name: str, models: Models):
    """Catches logits of the whole prompt: 32k tokens by 150k words are 20 GB."""
    model, rows = models(name), []
    target = decoding_target(model, (0,))
    hook = model.lm_head.register_forward_hook(lambda _module, _input, output: rows.append(output.shape[1]))
    assert target.start(some_tokens(30)).logits.shape == (1, 300)
    hook.remove()
    assert rows == [1]


def test_hooks_are_gone_afterwards(models: Models):
    """Catches a hook that outlives its reading, also after an error, and fills memory with every step of training."""
    model = models("llama")
    target = decoding_target(model, (0, 1))
    target.start([3, 4])
    with pytest.raises(IndexError):
        target.verify([300], [-1])
    assert not any(module._forward_hooks for module in model.modules())


def test_fork_shares_what_only_grows(models: Models):
    """Catches a copy of all keys and values for every path, and a state that both copies write to."""
    model, tokens = models("lfm2"), some_tokens(9)
    read = Reader(model, (0,))
    _, cache = read(tokens[:6], 1)
    twin = fork(cache)
    assert twin.layers[1].keys is cache.layers[1].keys
    before = cache.layers[0].conv_states[0].clone()
    read(tokens[6:], 3, twin)
    assert torch.equal(cache.layers[0].conv_states[0], before)
    assert (cache.get_seq_length(1), twin.get_seq_length(1)) == (6, 9)


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(name: str, dtype: torch.dtype, model_directory: Callable[[str], Path]):
    """Catches a mask, position or token that stays on the CPU, and a kernel that ignores the mask."""
    model = AutoModelForCausalLM.from_pretrained(model_directory(name), dtype=dtype).eval().cuda()
    target = decoding_target(model, (0, 1))
    assert type(target) is KINDS[name]
    if dtype is torch.float32:
        text = model.generate(
            torch.tensor([[4, 9, 7]]).cuda(), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 3:].tolist()
        assert greedy_by_trees(target, [4, 9, 7], text, 0) == text


@pytest.mark.parametrize("kind", [decoding_target, RerunTarget])
def test_layer_that_is_not_there(kind: Callable[..., Target], models: Models):
    """Catches an index error deep inside the run."""
    with pytest.raises(UserError, match="0 to 2"):
        kind(models("llama"), (0, 1, 3))
