import pytest
import torch
from torch import Tensor

from soar_prep.eagle3.vocab import check_mapping, choose_vocabulary, count_supervised
from soar_prep.errors import UserError


def test_only_supervised_tokens_count():
    """Catches a vocabulary spent on what users write, and counts whose length is not the target's vocabulary."""
    token_ids = torch.tensor([[3, 3, 1, 0], [3, 5, 5, 1]], dtype=torch.int32)
    loss_mask = torch.tensor([[False, True, True, False], [True, True, True, False]])
    counts = count_supervised(token_ids, loss_mask, 9)
    assert counts.tolist() == [0, 1, 0, 2, 0, 2, 0, 0, 0]
    assert counts.dtype is torch.int64


@pytest.mark.parametrize("token", [-1, 9])
def test_ids_outside_the_target_are_told(token: int):
    """Catches a tokenizer of another model, whose ids would index past the target's logits."""
    with pytest.raises(UserError, match=r"token ids -?\d to \d: expected 0 to 8, the target's vocabulary; are"):
        count_supervised(torch.tensor([3, token]), torch.tensor([True, True]), 9)
    count_supervised(torch.tensor([3, token]), torch.tensor([True, False]), 9)


def test_vocabulary_by_hand():
    """Catches ids in order of frequency, d2t that holds ids where SGLang adds offsets, and a wrong coverage."""
    vocabulary = choose_vocabulary(torch.tensor([0, 4, 1, 0, 9, 2, 0, 0]), 3)
    assert vocabulary.target_ids.tolist() == [1, 4, 5]
    assert vocabulary.d2t.tolist() == [1, 3, 3]
    assert vocabulary.t2d.tolist() == [False, True, False, False, True, True, False, False]
    assert vocabulary.coverage == 15 / 16
    assert (vocabulary.d2t.dtype, vocabulary.t2d.dtype) == (torch.int64, torch.bool)
    check_mapping(vocabulary.d2t, vocabulary.t2d, "x")


def test_ties_go_to_the_lower_id():
    """Catches a vocabulary that depends on the sort of a machine: many rare tokens have the same count."""
    counts = torch.ones(5000, dtype=torch.int64)
    counts[4000] = 2
    assert choose_vocabulary(counts, 130).target_ids.tolist() == [*range(129), 4000]


def test_unused_ids_fill_up():
    """Catches the crash, or the short vocabulary, where fewer distinct tokens occur than are wished."""
    vocabulary = choose_vocabulary(torch.tensor([0, 0, 7, 0, 0, 3]), 4)
    assert vocabulary.target_ids.tolist() == [0, 1, 2, 5]
    assert vocabulary.coverage == 1.0
    check_mapping(vocabulary.d2t, vocabulary.t2d, "x")


def test_control_tokens_are_always_in():
    """Catches a draft that cannot guess the end of an answer since EOS is rare beside words, and one that carries
    control tokens that never occur."""
    counts = torch.tensor([9, 8, 7, 1, 0, 6])
    assert choose_vocabulary(counts, 3).target_ids.tolist() == [0, 1, 2]
    assert choose_vocabulary(counts, 3, always={3, 4, 99}).target_ids.tolist() == [0, 1, 3]
    assert choose_vocabulary(counts, 1, always=[3]).target_ids.tolist() == [3]
    with pytest.raises(UserError, match="draft_vocab_size=1: 2 control tokens occur and must be in; raise it"):
        choose_vocabulary(counts, 1, always=[3, 5])


def test_whole_vocabulary_maps_to_itself():
    """Catches an offset that is off by one at the far end."""
    vocabulary = choose_vocabulary(torch.arange(1, 18), 17)
    assert not vocabulary.d2t.any()
    assert vocabulary.t2d.all()
    assert vocabulary.coverage == 1.0


def test_coverage_of_many_tokens_is_exact():
    """Catches counts divided in float32, which loses what lies beyond 2^24 of them."""
    counts = torch.tensor([2**30, 1])
    assert choose_vocabulary(counts, 1).coverage == 2**30 / (2**30 + 1) < 1.0


@pytest.mark.parametrize("size", [0, -1, 9])
def test_unfit_size_is_told(size: int):
    """Catches a draft vocabulary larger than the target's, whose mapping would point outside."""
    with pytest.raises(UserError, match=rf"draft_vocab_size={size}: expected 1 to 8, the target's vocabulary"):
        choose_vocabulary(torch.ones(8, dtype=torch.int64), size)


def test_no_counts_are_told():
    """Catches a vocabulary of the lowest ids chosen from nothing."""
    with pytest.raises(UserError, match="no token is supervised"):
        choose_vocabulary(count_supervised(torch.tensor([1]), torch.tensor([False]), 8), 3)


D2T = torch.tensor([1, 3, 3])  # target ids 1, 4, 5
T2D = torch.tensor([False, True, False, False, True, True, False, False])


def changed(tensor: Tensor, at: int, value: int) -> Tensor:
    other = tensor.clone()
    other[at] = value
    return other


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (changed(D2T, 2, 6), T2D, "d2t maps draft token 2 to target token 8; expected one of 0 to 7; the file"),
        (changed(D2T, 0, -1), T2D, "d2t maps draft token 0 to target token -1; expected one of 0 to 7"),
        (changed(D2T, 2, 2), T2D, "draft token 2 to target token 4; expected one above 4, that of the draft token be"),
        (changed(D2T, 1, -1), T2D, "draft token 1 to target token 0; expected one above 1"),
        (changed(D2T, 1, 2), T2D, "draft token 1 to target token 3; expected one that t2d marks"),
        (torch.tensor([1, 4, 5]), T2D, "draft token 2 to target token 7; .*d2t holds ids where offsets belong"),
        (D2T, changed(T2D, 4, 0), "draft token 1 to target token 4; expected one that t2d marks"),
        (D2T, changed(T2D, 6, 1), "t2d marks target token 6, but d2t maps no draft token to it"),
        (D2T[:2], T2D, "t2d marks target token 5, but"),
        (D2T.int(), T2D, r"d2t torch\.int32 \[3\], t2d torch\.bool \[8\]; expected int64 \[D\] and bool \[V\]"),
        (D2T, T2D.long(), r"t2d torch\.int64 \[8\]; expected"),
        (D2T[:, None], T2D, r"d2t torch\.int64 \[3, 1\]"),
        (D2T[:0], T2D, r"d2t torch\.int64 \[0\]"),
        (D2T, T2D[:2], r"t2d torch\.bool \[2\]; expected int64 \[D\] and bool \[V\], D of 1 to V"),
    ],
)
def test_first_inconsistent_id_is_named(d2t: Tensor, t2d: Tensor, message: str):
    """Catches a mapping that serves: the target would verify other tokens than the draft meant, and accept none."""
    check_mapping(D2T, T2D, "draft")
    with pytest.raises(UserError, match=f"^draft: .*{message}"):
        check_mapping(d2t, t2d, "draft")
