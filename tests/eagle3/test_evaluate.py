import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soar_prep.checkpoint import Checkpoint
from soar_prep.eagle3.data import Batching, collect
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.evaluate import Prompt, acceptance, decode_prompts, position_buckets, prompts_of
from soar_prep.eagle3.metrics import Acceptance, StepSums
from soar_prep.eagle3.supervision import chat_rows, make_row
from soar_prep.eagle3.target import Target
from soar_prep.settings import Compute, Data, Decoding, Loss
from soar_prep.streaming import StreamedModel
from soar_prep.text import load_tokenizer


@pytest.fixture(scope="module")
def target(model_directory: Callable[[str], Path]) -> Target:
    return Target(StreamedModel(Checkpoint(model_directory("llama")), Compute(device="cpu")), (0, 1, 2))


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    torch.manual_seed(0)
    return Draft(DraftConfig.for_target(target.model.model.config, aux_layers=(0, 1, 2), max_position_embeddings=20000))


def test_prompts_end_where_the_answer_begins():
    """Catches a prompt that holds the answer, or one that leaves no room for it."""
    chat = make_row(range(10, 22), [0] * 5 + [1] * 7, 99, "code")
    text = make_row(range(30, 50), [1] * 20, 99)
    samples = collect([chat, text, chat])
    assert prompts_of(samples, 3, 99) == [
        Prompt(list(range(10, 15)), "code"),
        Prompt(list(range(30, 40))),
        Prompt(list(range(10, 15)), "code"),
    ]
    assert len(prompts_of(samples, 2, 99)) == 2
    assert prompts_of(samples, 3, 7) == [Prompt(list(range(10, 15)), "code")] * 2


def test_domains_come_from_the_rows(tmp_path: Path, model_directory: Callable[[str], Path]):
    """Catches figures by domain that mix the rows up."""
    turns = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one, of course."}]
    rows = [{"messages": turns, "domain": name} for name in ("code", "chat", "code")] + [{"messages": turns}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(model_directory("llama"), False)
    samples = collect(chat_rows(Data(path=str(tmp_path / "chats.jsonl"), length=64), tokenizer))
    assert sorted(samples.domains) == ["", "chat", "code", "code"]
    assert samples.part(1, 3).domains == samples.domains[1:3]


def test_buckets_hold_the_longest_sample_and_fit_the_draft(draft: Draft):
    """Catches positions that the draft does not have, and samples that do not fit into the first ones."""
    assert position_buckets(draft, 100) == [4096, 8192, 16384]
    assert position_buckets(draft, 4096) == [8192, 16384]
    small = Draft(replace(draft.config, max_position_embeddings=4095))
    assert position_buckets(small, 10) == []


def test_positions_change_the_figures_and_batches_do_not(target: Target, draft: Draft):
    """Catches buckets that are all evaluated at natural positions, and figures that depend on the batches."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(300, (n,), generator=generator).tolist() for n in (30, 17, 24, 9)]
    samples = collect([make_row(ids, [1] * len(ids), 99) for ids in rows])
    found = acceptance(draft, target, samples, Batching(40), Loss(steps=3), [4096, 8192])
    assert list(found) == ["natural", "4096", "8192"]
    assert len({round(figures["alpha"][1], 9) for figures in found.values()}) == 3
    packed = acceptance(draft, target, samples, Batching(64, row_tokens=64, seed=5), Loss(steps=3))
    assert packed["natural"]["alpha"] == pytest.approx(found["natural"]["alpha"], rel=1e-5)


def test_real_decoding_is_compared_to_the_targets_own(target: Target, draft: Draft):
    """Catches an output that is called equal because it is compared to itself."""
    prompts = [Prompt([5, 6, 7], "a"), Prompt([8, 9], "b"), Prompt([1, 2, 3, 4], "a")]
    how = Decoding(tokens=10, depth=3, candidates=5, width=2)
    plain: dict[int, list[int]] = {}
    with target.decoder() as decoder:
        found = decode_prompts(draft, decoder, target.embed, prompts, how, [], plain)
        assert {len(tokens) for tokens in plain.values()} == {10}
        for figures in found.values():
            assert (figures["equal"], figures["prompts"], figures["tokens"]) == (3, 3, 30)
            assert sum(figures["lengths"]) == figures["rounds"]
            assert 1 <= figures["accepted"] <= 4
            assert set(figures["by_domain"]) == {"a", "b"}
        plain[1] = [*plain[1][:-1], plain[1][-1] + 1]
        assert decode_prompts(draft, decoder, target.embed, prompts, how, [], plain)["tree"]["equal"] == 2
    generated = target.model.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=10, do_sample=False)
    assert plain[0] == generated[0, 3:].tolist()


def test_sums_of_processes_add_up():
    """Catches a step or a figure that only the first process has."""
    one, two = Acceptance([StepSums(count=1, alpha=0.5)]), Acceptance([StepSums(2, 1.5), StepSums(4, 2.0)])
    one.merge(two)
    assert [(sums.count, sums.alpha) for sums in one.steps] == [(3, 2.0), (4, 2.0)]
