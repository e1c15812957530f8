"""Speed of fixed reference shapes on this machine, and a first check of a device.

    python -m tango_jax.bench [--json] [--only=R1,R2] [--runs=5]
    python -m tango_jax.bench --check [--out=device_check] [--only=parity,quickstart] [--minutes=9]

The model has 4.07 M random parameters in float32: 4 layers, D=256, 4 query and 2 key/value heads of 64, F=1024, V=512.
    R1  sample: 64 rows = 8 prompts x 8 samples, prompt 64, 128 new tokens each. New tokens per second.
    R2  update: forward, backward and AdamW on 64 x (64 + 128) tokens, clipped policy loss, no reference. Seconds.
    R3  GRPO step: R1, a trivial reward, reference log-probs (k3 KL), update. Seconds.
    R4  ragged sample: R1 with stopping lengths from a fixed heavy-tailed list, mean 128, longest 512. Useful tokens per
        second, and their share of R1's rate.
    R5  Tango cycle: 3 generator steps and 1 verifier step at R1's sizes (verifier: prompt 256, response 128). Seconds.
Figures are medians after warm-up. The machine's rates (float32 matmul, memory read) are printed with them.

--check tests a new device without a network, in this order: devices and versions; whether attention, sampler, int8 and
adapters compute in bfloat16 what float32 does; prefill, decode, score and update of 8 layers of a 7B model, beside the
plan; a short quickstart; and SmolLM2-135M on last_letter for as many turns as fit, if TANGO_SMOLLM2 names its .gguf
file. Each step runs in a process; one that fails is a line of the table. check.md and check.json in --out are written
anew after every row; paste check.md into an issue.
Exit code 1 if a step failed or a difference is larger than allowed.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Sequence

import jax
import numpy as np

from tango_jax.cli.arguments import Parser
from tango_jax.cli.ranges import check_options
from tango_jax.cli.session import configure
from tango_jax.config import default_config, role_config
from tango_jax.models.transformer import ModelConfig, init_params
from tango_jax.planning.device_check import KINDS, MARKDOWN_NAME, check_device, exit_code
from tango_jax.planning.device_steps import SIZES
from tango_jax.records import Rollout
from tango_jax.rl import advantages, losses
from tango_jax.rl.optimizer import make_optimizer
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.score import make_score
from tango_jax.rl.update import LossConfig, init_state, make_policy_loss, make_update
from tango_jax.runtime import rng
from tango_jax.runtime.checks import cut, folder_to_write
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.keys import Range
from tango_jax.runtime.machine import describe_machine, machine_rates, median_seconds, medians_of_alternating_runs
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.sampler import SampleRequest, make_sampler

MODEL = ModelConfig(
    vocab_size=512,
    width=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_width=1024,
    remat="dots",
    unroll=True,
)
P, M, PROMPT, NEW, VERIFIER_PROMPT, LONGEST = 8, 8, 64, 128, 256, 512
NEVER = MODEL.vocab_size + 7  # a stop id that no token has
ROW_BUCKETS = (2, 3, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64)
RANGES = {"runs": Range(1, 10_000), "minutes": Range(0.01, 10_000.0)}
OPTIONS = {"runs": 5}
CHECK_OPTIONS = {"out": "device_check", "size": "full", "minutes": 9.0}
BENCHES = ("R1", "R2", "R3", "R4", "R5")


def heavy_tailed_lengths() -> np.ndarray:
    """64 stopping lengths, mean 128, longest 512: quantiles of a log-normal, shuffled."""
    normal = statistics.NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / (P * M)) for i in range(P * M)])
    lengths = np.clip(np.round(89.8325 * np.exp(0.9 * z)), 1, LONGEST).astype(np.int32)  # a scale with mean 128
    lengths[-1] = LONGEST
    return np.random.default_rng(0).permutation(lengths)


@dataclasses.dataclass
class Role:
    """One policy at the reference shapes. Its state changes as updates donate it."""

    prompt_length: int
    longest: int
    kl_coef: float

    def __post_init__(self):
        config = role_config()
        optimizer = make_optimizer(config.optimizer)
        loss = config.loss
        loss_config = LossConfig(
            1.0,
            loss.clip_low,
            loss.clip_high,
            loss.ratio,
            self.kl_coef,
            loss.kl_kind,
            entropy_coef=0.0,
            importance_cap=0.0,
            has_old_logp=False,
            logp_chunk=0,
        )
        make_state = jax.jit(lambda key: init_state(optimizer, init_params(MODEL, jax.random.wrap_key_data(key))))
        self.state = make_state(rng.step_key(0, "bench"))
        self.reference = make_state(rng.step_key(1, "bench")).params
        cache_buckets = tuple(b for b in range(64, LONGEST + 1, 64) if b <= self.longest)
        rows = ROW_BUCKETS if self.longest > NEW else (P, P * M)
        self.sampler = make_sampler(MODEL, SamplerConfig((self.prompt_length,), cache_buckets, rows), (NEVER,))
        self.update = make_update(optimizer, make_policy_loss(MODEL, loss_config))
        self.score = make_score(MODEL, 1.0, 0)
        generator = np.random.default_rng(0)
        self.prompts = [list(generator.integers(3, MODEL.vocab_size, self.prompt_length)) for _ in range(P * M)]

    def sample(self, step: int, group_size: int, count: int, max_new: int | np.ndarray = NEW) -> Rollout:
        request = SampleRequest(self.prompts[:count], group_size, rng.step_key(step, "bench"), 1.0, max_new=max_new)
        return self.sampler.sample(self.sampler.layout(self.state.params), request)

    def train(self, rollout: Rollout) -> dict:
        reward_B = np.array([np.mean(tokens % 2) for tokens in rollout.tokens])
        is_action_BT = np.ones((P * M, NEW), bool)
        adv_BT = (advantages.grpo_outcome_B(reward_B, M)[:, None] * is_action_BT).astype(np.float32)
        weight_BT = losses.token_weights_BT(is_action_BT, "token_mean", NEW)
        sequences = [
            TrainSequence(self.prompts[b // M], rollout.tokens[b], weight_BT[b], adv_BT[b], rollout.logps[b])
            for b in range(P * M)
        ]
        shape = PackShape(row_length=NEW + 1, rows=M, prompts=1, prompt_buckets=(self.prompt_length,))
        batch = pack(sequences, shape, P * M, P)
        if self.kl_coef > 0:
            batch = batch.replace(ref_logp_NZRT=self.score(self.reference, batch))
        self.state, metrics = self.update(self.state, batch)
        return metrics


def run(names: tuple[str, ...], runs: int) -> dict:
    report = {"machine": machine_rates()}
    plain = functools.cache(lambda: Role(PROMPT, NEW, kl_coef=0.0))
    with_kl = functools.cache(lambda: Role(PROMPT, NEW, kl_coef=0.001))
    tokens = P * M * NEW
    if "R1" in names or "R4" in names:
        # R4 has fixed lengths: two calls compile every shape.
        ragged, lengths = functools.cache(lambda: Role(PROMPT, LONGEST, kl_coef=0.0)), heavy_tailed_lengths()
        fns = [lambda i: plain().sample(i, M, P), lambda i: ragged().sample(i, M, P, lengths)]
        seconds = medians_of_alternating_runs(fns if "R4" in names else fns[:1], runs)
        report["R1"] = {"tokens_per_s": tokens / seconds[0]}
        if "R4" in names:
            report["R4"] = {"useful_tokens_per_s": tokens / seconds[1], "share_of_R1": seconds[0] / seconds[1]}
    if "R2" in names:
        rollout = plain().sample(0, M, P)
        report["R2"] = {"seconds": median_seconds(lambda i: plain().train(rollout), runs)}
    if "R3" in names:
        report["R3"] = {"seconds": median_seconds(lambda i: with_kl().train(with_kl().sample(i, M, P)), runs)}
    if "R5" in names:
        generator, verifier = with_kl(), Role(VERIFIER_PROMPT, NEW, kl_coef=0.001)

        def cycle(i: int):
            for step in range(3):
                rollout = generator.sample(4 * i + step, M, P)
                verifier.sample(4 * i + step, 1, P * M)
                generator.train(rollout)
            generator.sample(4 * i + 3, 1, P)
            return verifier.train(verifier.sample(4 * i + 3, M, P))

        report["R5"] = {"seconds": median_seconds(cycle, max(3, runs // 2))}
    return {name: report[name] for name in (*BENCHES, "machine") if name in report}


def show(report: dict) -> None:
    rates = report["machine"]
    print(f"machine: {describe_machine()}, {rates['matmul_gflops']:.0f} GFLOP/s float32 matmul, "
          f"{rates['read_gb_s']:.1f} GB/s read")
    for name in filter(report.get, BENCHES):
        figures = (f"{key} {value:,.3g}" if value < 100 else f"{key} {value:,.0f}"
                   for key, value in report[name].items())
        print(f"{name}: {', '.join(figures)}")
    sys.stdout.flush()


def run_check(options: argparse.Namespace, kinds: tuple[str, ...]) -> int:
    out = folder_to_write("--out", options.out)
    log_fn = functools.partial(print, flush=True)
    report = check_device(out, kinds, options.size, options.minutes, log_fn)
    print(f"written: {out / MARKDOWN_NAME}, which can be pasted into an issue, and the same as JSON")
    return exit_code(report)


def parse_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, tuple[str, ...]]:
    parser = Parser("bench", __doc__)
    parser.add_flag("--json", "print one JSON object on standard output and nothing else")
    parser.add_flag("--check", "check that this device computes the right numbers, and time a short run")
    parser.add_argument("--only", help=f"comma-separated, such as R1,R2; with --check, of {','.join(KINDS)}")
    parser.add_argument("--runs", type=int, help=f"timed runs of each shape; the median is printed; default: "
                        f"{OPTIONS['runs']}")
    group = parser.add_argument_group("options of --check")
    group.add_argument("--out", metavar="DIR", help=f"folder of the report; default: {CHECK_OPTIONS['out']}")
    group.add_argument("--size", choices=tuple(SIZES), help="default: full; tiny is for tests")
    group.add_argument("--minutes", metavar="N", type=float, help="limit after which every step is stopped; default: "
                       f"{CHECK_OPTIONS['minutes']:g}")
    options = parser.parse_args(argv)
    if options.check and options.json:
        raise ValueError("--check writes its files itself: leave out --json")
    used, unused = (CHECK_OPTIONS, OPTIONS) if options.check else (OPTIONS, CHECK_OPTIONS)
    for name in unused:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} does not go with --check: leave one of them out" if options.check else
                             f"--{name} is an option of --check: add --check, or leave --{name} out")
    for name, default in used.items():
        setattr(options, name, default if getattr(options, name) is None else getattr(options, name))
    known = KINDS if options.check else BENCHES
    names = known if options.only is None else tuple(options.only.split(","))
    if not set(names) <= set(known):
        raise ValueError(f"--only={cut(options.only)}: choose from {', '.join(known)}, separated by commas")
    check_options(options, {name: allowed for name, allowed in RANGES.items() if name in used})
    return options, names


def main(argv: Sequence[str] | None = None) -> None:
    with ends_in_one_line():
        options, names = parse_options(argv)
        if options.check:  # its steps open the device
            sys.exit(run_check(options, names))
        if warning := configure(default_config()):
            print(warning, file=sys.stderr)
        report = run(names, options.runs)
        if options.json:
            print(json.dumps(report), flush=True)
        else:
            show(report)


if __name__ == "__main__":
    main()
