"""A learner on made-up lessons; run by torch.distributed.run, each process takes its rows of every lesson.

python -m torch.distributed.run --nproc-per-node=2 two_processes.py ddp|fsdp none|nvfp4 DIRECTORY
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from soar_prep.eagle3.data import Batch
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.learner import Learner, Lesson, Update
from soar_prep.eagle3.ttt import ask_teacher
from soar_prep.settings import DraftFormat, Loss, LossKind, Optimizer, Parallel, Qat

VOCABULARY, WIDTH, ROWS, TOKENS, UPDATES = 40, 16, 4, 12, 3
CONFIG = DraftConfig(
    hidden_size=WIDTH,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=VOCABULARY,
    draft_vocab_size=30,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    aux_layers=(0, 1, 2),
)
EMBEDDINGS = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2))


def new_learner(
    kind: LossKind = LossKind.hybrid,
    dtype: torch.dtype = torch.float32,
    parallel: Parallel = Parallel.ddp,
    checkpointing: bool = False,
    qat: Qat | None = None,
    **optimizer: Any,
) -> Learner:
    torch.manual_seed(0)
    draft = Draft(CONFIG)
    chosen = {"learning_rate": 3e-3, "warmup": 0.0} | optimizer
    table = EMBEDDINGS.to(dtype)
    return Learner(
        draft,
        lambda token_ids: table[token_ids],
        Loss(kind=kind, steps=3),
        Optimizer(**chosen),
        10,
        dtype,
        parallel,
        checkpointing,
        qat,
    )


def lessons(first: int, count: int, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> list[Lesson]:
    """Lessons `first` and those after it, or some rows of each: rows have different numbers of supervised tokens."""
    result = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + number)
        ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
        mask = torch.arange(TOKENS) >= torch.arange(1, ROWS + 1)[:, None] * 2
        documents = torch.arange(ROWS)[:, None].expand(ROWS, TOKENS).contiguous()
        positions = torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous()
        aux = torch.randn(ROWS, TOKENS, 3 * WIDTH, generator=generator)
        last = torch.randn(ROWS, TOKENS, WIDTH, generator=generator)
        batch = Batch(ids[rows], mask[rows], positions[rows], documents[rows])
        taught = ask_teacher(last[rows], lambda x: x @ HEAD.T, torch.arange(30), batch.loss_mask, batch.document_ids)
        result.append(Lesson(batch, aux[rows].to(dtype), taught))
    return result


def run(learner: Learner, updates: int, rows: slice = slice(None)) -> list[Update]:
    done = []
    for number in range(updates):
        if learner.done == learner.turn:
            learner.start_rounding(lessons(0, 1, rows))
        done.append(learner.update(lessons(number, 1, rows)))
    assert all(update is not None for update in done)
    return [update for update in done if update is not None]


def main() -> None:
    processes = PartialState(cpu=True)
    share = ROWS // processes.num_processes
    rows = slice(processes.process_index * share, (processes.process_index + 1) * share)
    parallel, qat, directory = Parallel(sys.argv[1]), Qat(DraftFormat(sys.argv[2]), share=0.8), Path(sys.argv[3])
    learner = new_learner(parallel=parallel, qat=qat, ema=0.9)
    updates = run(learner, UPDATES, rows)
    state = learner.state()
    again = new_learner(parallel=parallel, qat=qat, ema=0.9)
    again.load(state)
    (one,), (other,) = run_from(learner, rows), run_from(again, rows)
    if processes.is_main_process:
        names = ("loss", "gradient_norm", "mixing", "alpha", "accuracy")
        figures = {name: [getattr(update, name) for update in updates] for name in names}
        torch.save(figures | {"state": state, "resumed": one == other}, directory / "two.pt")
    processes.wait_for_everyone()  # as the command does: see cli.leave_processes
    processes.destroy_process_group()


def run_from(learner: Learner, rows: slice) -> list[Update]:
    """One update more."""
    update = learner.update(lessons(UPDATES, 1, rows))
    assert update is not None
    return [update]


if __name__ == "__main__":
    main()
