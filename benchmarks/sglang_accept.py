"""How many tokens a round an EAGLE-3 draft gives in a real SGLang, beside soar-prep's own decoder, prompt by prompt.

    python benchmarks/sglang_accept.py decode TARGET DRAFT PROMPTS ours.json                # soar-prep's decoder
    python benchmarks/sglang_accept.py serve TARGET DRAFT PROMPTS sglang.json --own ours.json --logs LOGS --together

TARGET: a Hugging Face directory, BF16 or NVFP4 in ModelOpt's layout. DRAFT: what `soar-prep train-draft` writes.
PROMPTS: JSON, a list of lists of token ids, or the file of `bench_draft.py run --keep`, whose end tokens then hold too.
Both decode greedily, --tokens at most, up to the target's end tokens, one prompt at a time. A --shapes word is SGLang's
steps/topk/num_draft_tokens: 7/1/8 is a chain, 7/4/15 a tree.
`serve` starts one sglang.Engine a shape and one without a draft, each in a process of its own, since a scheduler that
dies takes its parent along; --together starts them at the same time; --again reads what they left in LOGS earlier.

ours.json: {shape: [{"tokens": [...], "accepted": [...]}, ...]}, one record a prompt; accepted: a number a round.
sglang.json: {"target", "draft", "engines": {shape or "plain": {"seconds", "prompts": [...]}}, "summary"}.

Accepted length of a round: as in soar_prep/eagle3/decode.py: tokens that the target confirms in it, the bonus included,
whole where --tokens cuts the output, up to an end token where it ends there. What SGLang 0.5.21 reports, and what
becomes of it here:

  spec_verify_ct                 rounds (schedule_batch.py:1321)
  spec_num_correct_drafts        confirmed guesses of all rounds, bonuses NOT included, also those past the output's end
  spec_correct_drafts_histogram  rounds by confirmed guesses: the accepted length less one
  spec_accept_length             completion_tokens / spec_verify_ct (tokenizer_manager.py:2978): bonuses included, but
                                 so is the first token, which is of no round, and what --tokens cuts is missing
  here: accepted                 spec_verify_ct + spec_num_correct_drafts; completion_tokens - 1 after an end token

Outputs may differ from the engine's own without a draft: a tree is read by other kernels than a token, and BF16 logits
tie. So the first difference is reported with the gap between the plain engine's two best tokens there, in nats: a near
tie is rounding, a wide gap is an error. --engine '{"enable_fp32_lm_head": true}' makes ties rare.
In NVFP4, SGLang's Marlin rounds each weight_scale_2 to BF16 (marlin_utils_fp4.py:203): nothing is lost where it is a
power of two, soar-prep's default; else the two decoders hold different weights, and only lengths are comparable.

Needs sglang 0.5.21 and a GPU for `serve` (--device cpu: without a draft only), soar-prep for `decode`.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES = ("7/1/8", "7/4/15", "5/4/11")
PLAIN = "plain"
NEAR_TIE = 0.3  # nats; neighbouring BF16 logits of 16 to 32 lie 0.125 apart


def read_prompts(args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """(prompts, end tokens). SGLang stops at the target's own, so those always belong to them."""
    found = json.loads(args.prompts.read_text())
    prompts, given = (found["prompts"], found["ends"]) if isinstance(found, dict) else (found, [])
    ends = set(given)
    for name in ("config.json", "generation_config.json"):
        if (args.target / name).exists():
            own = json.loads((args.target / name).read_text()).get("eos_token_id")
            ends |= set(own) if isinstance(own, list) else set() if own is None else {own}
    return prompts, [] if args.ignore_eos else sorted(ends)


def accepted_of(meta: dict[str, Any]) -> int:
    """Sum of the accepted lengths of all rounds, by SGLang's meta_info of a finished request."""
    if meta["finish_reason"]["type"] == "stop":
        return meta["completion_tokens"] - 1
    return meta.get("spec_verify_ct", 0) + meta.get("spec_num_correct_drafts", 0)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two outputs part; None if they are equal."""
    if a == b:
        return None
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---------------------------------------------------------------------------- one engine, in a process of its own


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": str(args.target),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_flashinfer_autotune": True,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": max(args.concurrent, 4),
        "max_running_requests": args.concurrent,
        "max_total_tokens": args.cache,
        "mem_fraction_static": args.memory,
        "random_seed": 0,
        "skip_server_warmup": True,
        "log_level": "info",
    }
    if args.device == "cpu":
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
        }
    quantized = json.loads((args.target / "config.json").read_text()).get("quantization_config") or {}
    if quantized.get("quant_method") == "modelopt":
        arguments |= {"quantization": "modelopt_fp4", "fp4_gemm_runner_backend": "marlin"}
    if args.shape != PLAIN:
        steps, topk, candidates = map(int, args.shape.split("/"))
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(args.draft),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": candidates,
        }
        if quantized:
            arguments["speculative_draft_model_quantization"] = "unquant"  # else it takes the target's
    return arguments | json.loads(args.engine)


def run_engine(args: argparse.Namespace) -> None:
    import sglang

    prompts, ends = read_prompts(args)
    start = time.perf_counter()
    engine = sglang.Engine(**engine_arguments(args))
    up = time.perf_counter() - start
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": args.ignore_eos}
    if ends:
        sampling["stop_token_ids"] = ends
    warm = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    engine.generate(input_ids=[prompts[0][::-1]], sampling_params=warm)  # kernels are compiled now, not while timed
    more = {"return_logprob": True, "top_logprobs_num": 2} if args.shape == PLAIN else {}
    start = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling, **more)
    seconds = time.perf_counter() - start
    records = [record_of(answer) for answer in answers]
    result = {"shape": args.shape, "up_seconds": round(up, 1), "seconds": round(seconds, 3), "prompts": records}
    args.output.write_text(json.dumps(result))
    engine.shutdown()


def record_of(answer: dict[str, Any]) -> dict[str, Any]:
    meta, tokens = answer["meta_info"], list(answer["output_ids"])
    if len(tokens) != meta["completion_tokens"]:
        raise ValueError(f"{len(tokens)} output ids, but completion_tokens is {meta['completion_tokens']}")
    record = {"tokens": tokens, "finish": meta["finish_reason"]["type"]}
    if "output_top_logprobs" in meta:
        pairs = [[logprob for logprob, *_ in best] for best in meta["output_top_logprobs"]]
        record["gaps"] = [round(best - second, 4) for best, second in pairs]
    if "spec_verify_ct" in meta:
        record["rounds"], record["accepted"] = meta["spec_verify_ct"], accepted_of(meta)
        record |= {name: value for name, value in meta.items() if name.startswith("spec_")}
    return record


# ---------------------------------------------------------------------------- all engines


def serve(args: argparse.Namespace) -> int:
    args.logs.mkdir(parents=True, exist_ok=True)
    engines: dict[str, Any] = {}
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    waiting = [PLAIN, *args.shapes]
    if args.again:
        engines = {shape: read_result(args, shape, 0) for shape in waiting}
        waiting = []
    while waiting or running:
        if waiting and (args.together or not running):
            shape = waiting.pop(0)
            running[shape] = start_engine(args, shape)
            time.sleep(2 if args.together else 0)
        for shape, (process, started) in list(running.items()):
            if process.poll() is None and time.monotonic() - started > args.limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.poll() is not None:
                del running[shape]
                engines[shape] = read_result(args, shape, process.returncode)
        time.sleep(0.2)
    own = {shape: records for path in args.own for shape, records in json.loads(path.read_text()).items()}
    summary = summarize(engines, own, args.shapes)
    facts = {"target": str(args.target), "draft": str(args.draft), "tokens": args.tokens, "ignore_eos": args.ignore_eos}
    args.output.write_text(json.dumps(facts | {"engines": engines, "summary": summary}))
    show(engines, own, summary, args.shapes)
    return int(any("error" in engine for engine in engines.values()))


def file_of(args: argparse.Namespace, shape: str, ending: str) -> Path:
    return args.logs / f"{args.output.stem}-{shape.replace('/', '-')}{ending}"


def start_engine(args: argparse.Namespace, shape: str) -> tuple[subprocess.Popen[bytes], float]:
    file_of(args, shape, ".json").unlink(missing_ok=True)
    command = [sys.executable, __file__, "engine", str(args.target), str(args.draft), str(args.prompts)]
    command += [str(file_of(args, shape, ".json")), "--shape", shape, "--engine", args.engine, "--device", args.device]
    for name in ("tokens", "concurrent", "cache", "memory"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--ignore-eos"] * args.ignore_eos
    with file_of(args, shape, ".log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    return process, time.monotonic()


def read_result(args: argparse.Namespace, shape: str, code: int) -> dict[str, Any]:
    """What the engine wrote; if nothing, the end of its log. A process that fails only as it ends has done its work."""
    if file_of(args, shape, ".json").exists():
        return json.loads(file_of(args, shape, ".json").read_text())
    log = file_of(args, shape, ".log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return {"error": f"exit code {code}", "log": [line[:300] for line in lines if line.strip()][-25:]}


def summarize(engines: dict[str, Any], own: dict[str, Any], shapes: list[str]) -> dict[str, Any]:
    plain = engines[PLAIN].get("prompts")
    summary: dict[str, Any] = {}
    for shape in shapes:
        engine = engines[shape]
        if "error" in engine:
            continue
        records = engine["prompts"]
        rounds, accepted = (sum(record.get(name, 0) for record in records) for name in ("rounds", "accepted"))
        reported = [record["spec_accept_length"] for record in records if "spec_accept_length" in record]
        figures: dict[str, Any] = {
            "rounds": rounds,
            "accepted_length": accepted / max(rounds, 1),
            "mean_spec_accept_length": statistics.fmean(reported) if reported else None,
            "lengths": lengths(records),
            "tokens_per_second": sum(len(record["tokens"]) for record in records) / max(engine["seconds"], 1e-3),
        }
        if plain:
            for record, truth in zip(records, plain, strict=True):
                at = first_difference(record["tokens"], truth["tokens"])
                gap = None if at is None or at >= len(truth["gaps"]) else truth["gaps"][at]
                record |= {"equal": at is None, "differs_at": at, "gap": gap}
            figures["equal"] = sum(record["equal"] for record in records)
            figures["wide_gaps"] = sum(not record["equal"] and (record["gap"] or 0) > NEAR_TIE for record in records)
        if shape in own:
            figures |= compare(records, own[shape])
        summary[shape] = figures
    return summary


def lengths(records: list[dict[str, Any]]) -> list[int]:
    """Rounds by accepted length, from 1 up; a round that an end token cuts is counted whole."""
    histograms = [record.get("spec_correct_drafts_histogram", []) for record in records]
    longest = max(map(len, histograms), default=0)
    return [sum(h[n] for h in histograms if n < len(h)) for n in range(longest)]


def compare(records: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[str, Any]:
    """Our decoder beside SGLang: over all prompts, and over those alone where both put out the same tokens."""
    if len(own) != len(records):
        raise SystemExit(f"--own holds {len(own)} prompts, SGLang answered {len(records)}: not the same prompts")
    figures: dict[str, Any] = {}
    pairs = list(zip(records, own, strict=True))
    for record, ours in pairs:
        record["own_accepted"], record["own_rounds"] = sum(ours["accepted"]), len(ours["accepted"])
        record["own_differs_at"] = first_difference(record["tokens"], ours["tokens"])
    alike = [record for record, _ in pairs if record["own_differs_at"] is None]
    for ending, chosen in (("", [record for record, _ in pairs]), ("_where_equal", alike)):
        theirs, ours = (
            sum(record.get(prefix + "accepted", 0) for record in chosen)
            / max(sum(record.get(prefix + "rounds", 0) for record in chosen), 1)
            for prefix in ("", "own_")
        )
        names = ("accepted_length", "own_accepted_length", "ratio")
        values = (theirs, ours, ours and theirs / ours)
        figures |= {name + ending: value for name, value in zip(names, values, strict=True)}
    same_rounds = sum(record.get("rounds", 0) == record["own_rounds"] for record in alike)
    return figures | {"own_equal": len(alike), "own_equal_and_same_rounds": same_rounds}


def show(engines: dict[str, Any], own: dict[str, Any], summary: dict[str, Any], shapes: list[str]) -> None:
    for shape in (PLAIN, *shapes):
        engine = engines[shape]
        if "error" in engine:
            print(f"{shape}: {engine['error']}", *engine["log"], sep="\n    ")
            continue
        print(f"{shape}: up in {engine['up_seconds']} s, {len(engine['prompts'])} prompts in {engine['seconds']} s")
        for number, record in enumerate(engine["prompts"]):
            print(f"  prompt {number}: {prompt_line(record)}")
            print(f"    {' '.join(map(str, record['tokens']))}")
    print("--- rounds by accepted length are counted from 1 up")
    for shape, figures in summary.items():
        count = len(engines[shape]["prompts"])
        line = f"{shape}: accepted length {figures['accepted_length']:.3f} over {figures['rounds']} rounds "
        line += f"{figures['lengths']}, {figures['tokens_per_second']:.0f} tok/s"
        if figures["mean_spec_accept_length"]:
            line += f"; SGLang's spec_accept_length, mean of the prompts: {figures['mean_spec_accept_length']:.3f}"
        if "equal" in figures:
            line += f"; {figures['equal']}/{count} equal to plain, {figures['wide_gaps']} differ where no near tie is"
        print(line)
        if "own_accepted_length" in figures:
            print(
                f"    own decoder {figures['own_accepted_length']:.3f}, SGLang / own = {figures['ratio']:.4f}; "
                f"{figures['own_equal']}/{count} outputs equal, {figures['own_equal_and_same_rounds']} of them in as "
                "many rounds"
            )
            if figures["own_equal"]:
                print(
                    f"    where equal {figures['accepted_length_where_equal']:.3f}, own decoder "
                    f"{figures['own_accepted_length_where_equal']:.3f}, ratio {figures['ratio_where_equal']:.4f}"
                )
        elif own:
            print(f"    --own holds nothing for {shape}")


def prompt_line(record: dict[str, Any]) -> str:
    line = f"{len(record['tokens'])} tokens, {record['finish']}"
    if record.get("rounds"):
        line += f", {record['rounds']} rounds, accepted length {record['accepted'] / record['rounds']:.3f}"
        line += f" (spec_accept_length {record['spec_accept_length']:.3f})"
    if "equal" in record:
        line += ", equal to plain" if record["equal"] else f", differs at {record['differs_at']}, gap {record['gap']}"
    if record.get("own_rounds"):
        line += f"; own {record['own_accepted'] / record['own_rounds']:.3f}"
        line += f", same until {record['own_differs_at']}" if record["own_differs_at"] is not None else ", same tokens"
    return line


# ---------------------------------------------------------------------------- soar-prep's own decoder


def decode(args: argparse.Namespace) -> int:
    from soar_prep.checkpoint import Checkpoint
    from soar_prep.eagle3.decode import Speculation
    from soar_prep.eagle3.decode import decode as speculate
    from soar_prep.eagle3.export import read_draft
    from soar_prep.eagle3.target import Target
    from soar_prep.settings import Compute
    from soar_prep.streaming import StreamedModel

    model = StreamedModel(Checkpoint(args.target), Compute(dtype=args.dtype))
    draft = read_draft(args.draft).to(model.device, model.dtype)
    target = Target(model, draft.config.aux_layers)
    prompts, ends = read_prompts(args)
    result: dict[str, list[dict[str, Any]]] = {}
    with target.decoder() as decoder:
        for shape in args.shapes:
            steps, topk, candidates = map(int, shape.split("/"))
            how = Speculation(steps, candidates, topk)
            result[shape] = []
            for prompt in prompts:
                decoded = speculate(decoder, draft, target.embed, prompt, how, args.tokens, ends)
                result[shape].append({"tokens": decoded.tokens, "accepted": decoded.accepted})
            accepted = [length for record in result[shape] for length in record["accepted"]]
            print(f"{shape}: accepted length {statistics.fmean(accepted):.3f} over {len(accepted)} rounds", flush=True)
    args.output.write_text(json.dumps(result))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("serve", "decode", "engine"), help="engine: one, as `serve` starts it")
    for name in ("target", "draft", "prompts", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--shape", default=PLAIN, help="of `engine`")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--own", type=Path, nargs="+", default=[], help="what `decode` wrote")
    parser.add_argument("--logs", type=Path, default=Path("sglang-logs"))
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--limit", type=int, default=240, help="seconds an engine may live")
    parser.add_argument("--concurrent", type=int, default=1, help="prompts at a time")
    parser.add_argument("--cache", type=int, default=16384, help="tokens that SGLang's KV cache holds")
    parser.add_argument("--memory", type=float, default=0.6, help="mem_fraction_static")
    parser.add_argument("--engine", default="{}", help="JSON, further arguments of sglang.Engine")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="auto", help="of `decode`: bfloat16 or float32; bfloat16 on a GPU")
    args = parser.parse_args()
    if args.what == "engine":
        run_engine(args)
    else:
        raise SystemExit(serve(args) if args.what == "serve" else decode(args))


if __name__ == "__main__":
    main()
