"""A draft of soar-prep's in a real SGLang 0.5.21 Engine, on the CPU, beside soar-prep's own speculative decoding.

A tiny target of random weights, and a draft fitted to it halfway, so that some guesses stand and others fall. The
output must be the target's own, and in every request as many guesses must stand as soar-prep says, round for round.
Catches target states of other layers or tokens, positions off by one, a hidden or a token map that is not ours: with
those the output stays right, and only the speed is lost. The last draft has such a fault, and must be noticed. One of
the others is in NVFP4, its lm_head too.

Run by `make contract`; fails by an exception. The attention is SGLang's torch_native; stubs/contract_plugin.py and
stubs/sgl_kernel.py say what had to be added for it, stubs/contract_kernels.py for NVFP4.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from nvfp4_draft import rounded
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from soar_prep.eagle3.decode import Decoded, Speculation, decode
from soar_prep.eagle3.draft import Draft, DraftConfig
from soar_prep.eagle3.export import write_draft
from soar_prep.eagle3.hf_target import decoding_target

VOCABULARY, DRAFT_VOCABULARY = 200, 40
GUESSES, NEW_TOKENS = 3, 48
PROMPT_LENGTHS = (5, 17, 40)
NVFP4, FAULT = " in NVFP4", " and the next layers' states"


def make_target(folder: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        dtype="float32",
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    target.save_pretrained(folder)
    return target


def greedy(target: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """The target alone, everything anew for each token."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def make_draft(target: LlamaForCausalLM, prompts: list[list[int]], outputs: list[list[int]], **changes: bool) -> Draft:
    """A draft of the tokens that the target likes; a few steps fit its first guess to the outputs."""
    torch.manual_seed(0)
    draft = Draft(DraftConfig.for_target(target.config, draft_vocab_size=DRAFT_VOCABULARY, **changes))
    for parameter in draft.parameters():
        is_norm = parameter.dim() == 1
        nn.init.normal_(parameter, mean=float(is_norm), std=0.3 if is_norm else 0.12)
    liked = [token for token, _ in Counter(itertools.chain(*outputs)).most_common(DRAFT_VOCABULARY)]
    draft.set_vocabulary(torch.tensor(sorted(liked)))
    reader = decoding_target(target, draft.config.aux_layers)
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    for prompt, output in [*zip(prompts, outputs, strict=True)] * 4:
        tokens = torch.tensor(prompt + output)
        positions = torch.arange(len(tokens) - 2)[None]
        hidden = draft.project(reader.start(tokens[:-2].tolist()).aux[None])
        step = draft.step(hidden, target.model.embed_tokens(tokens[None, 1:-1]), positions, causal)
        known = draft.t2d[tokens[2:]]
        guesses = torch.searchsorted(draft.target_ids(), tokens[2:][known])
        optimizer.zero_grad()
        F.cross_entropy(draft.logits(step.normed[0, known]), guesses).backward()
        optimizer.step()
    return draft.requires_grad_(False)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def decode_ours(target: LlamaForCausalLM, draft: Draft, prompt: list[int]) -> Decoded:
    chain = Speculation(depth=GUESSES, candidates=GUESSES + 1, width=1)
    reader = decoding_target(target, draft.config.aux_layers)
    return decode(reader, draft, target.model.embed_tokens, prompt, chain, NEW_TOKENS)


def decode_in_sglang(folder: Path, prompts: list[list[int]]) -> list[dict]:
    """The Engine's answers; in a process of its own, for an Engine that dies takes its parent with it."""
    (folder / "prompts.json").write_text(json.dumps(prompts))
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, __file__, str(folder)], env=environment, check=True, timeout=900, stdout=sys.stderr)
    return json.loads((folder / "answers.json").read_text())


def serve(folder: Path) -> None:
    import sglang

    is_nvfp4 = "quantization_config" in json.loads((folder / "draft" / "config.json").read_text())
    engine = sglang.Engine(
        model_path=str(folder.parent / "target"),
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        disable_cuda_graph=True,
        max_total_tokens=2048,
        max_running_requests=4,
        context_length=512,
        mem_fraction_static=0.3,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(folder / "draft"),
        speculative_draft_model_quantization="modelopt_fp4" if is_nvfp4 else "unquant",
        speculative_num_steps=GUESSES,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=GUESSES + 1,
    )
    prompts = json.loads((folder / "prompts.json").read_text())
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    (folder / "answers.json").write_text(json.dumps(engine.generate(input_ids=prompts, sampling_params=sampling)))
    engine.shutdown()


def take_the_next_layers(draft: Path) -> None:
    """The fault: layers counted as SGLang does inside, where a layer's input bears its number."""
    config = json.loads((draft / "config.json").read_text())
    eagle = config["eagle_config"]
    eagle["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in eagle["eagle_aux_hidden_state_layer_ids"]]
    (draft / "config.json").write_text(json.dumps(config))


def main(folder: Path) -> None:
    target = make_target(folder / "target")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    outputs = [greedy(target, prompt) for prompt in prompts]
    for options, kind in ((True, ""), (True, NVFP4), (False, ""), (False, FAULT)):
        name = f"fc_norm={options} norm_output={options}{kind}"
        is_faulty = kind == FAULT
        draft = make_draft(target, prompts, outputs, fc_norm=options, norm_output=options)
        if kind == NVFP4:
            draft = rounded(draft, lm_head=True)
        decoded = [decode_ours(target, draft, prompt) for prompt in prompts]
        write_draft(draft, folder / name / "draft", torch.float32)
        if is_faulty:
            take_the_next_layers(folder / name / "draft")
        answers = decode_in_sglang(folder / name, prompts)

        ours = [Counter(count - 1 for count in each.accepted) for each in decoded]
        rounds = [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
        theirs = [Counter(dict(enumerate(counts))) for counts in rounds]
        print(f"{name}: rounds in which 0, 1, 2, ... guesses stand: {rounds}")
        assert [each.tokens for each in decoded] == outputs, f"{name}: soar-prep's output is not the target's"
        assert [answer["output_ids"][-NEW_TOKENS:] for answer in answers] == outputs, f"{name}: SGLang's is not"
        if is_faulty:
            assert theirs != ours, f"{name}: nothing notices it"
        else:
            assert theirs == ours, f"{name}: soar-prep says {ours}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(Path(sys.argv[1]))
    else:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
        seconds = time.perf_counter() - begin
        print(f"contract: in SGLang 0.5.21's Engine as many guesses stand as soar-prep says ({seconds:.0f} s)")
