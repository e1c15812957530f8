"""Settings: overrides, the checks made before any work, and one line for every mistake a user can make."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import FIXTURES, ROOT, ROWS
from support.processes import HANG_S
from tango_jax import ablate, generate, sft, train
from tango_jax.cli import task_validation, validation
from tango_jax.cli.arguments import COMMON_KEYS, Parser
from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.cli.config_file import stored_config
from tango_jax.cli.validation import validate
from tango_jax.config import GONE, ROLES, default_config, flatten
from tango_jax.runtime.checks import Mistakes, SettingsError
from tango_jax.tasks import last_letter
from tango_jax.tasks.registry import SYNTHETIC
from tango_jax.tasks.sizes import SPLITS
from tango_jax.tracking.run_config import ANY_PLACE, check_config, check_same_settings, keep_config, save_config
from tango_jax.weights.workdir import read_config

CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem != "own_problems")  # it needs arguments
# What the lengths must hold (test_last_letter.py compares these numbers with tokenized text): 2 words of 3 letters.
LONGEST = last_letter.longest_texts(2, 3)
SFT_LENGTH = LONGEST["generator prompt"] + LONGEST["generator response"]
# Settings of the math task that are right; what is said later of the same key holds.
MATH = (
    f"task.name=math task.train={ROWS / 'gsm8k.jsonl'} task.test={ROWS / 'gsm8k_short.jsonl'} task.stage_one=gsm8k "
    "task.validation=2 generator.checkpoint=a/b verifier.checkpoint=a/b "
)
SMALL = """
from tango_jax.config import default_config

def get_config(argument):
    config = default_config()
    config.seed = int(argument or 0)
    for role in (config.generator, config.verifier):
        role.template = "last_letter"
        role.max_prompt, role.max_response = 40, 36
        role.prompt_buckets, role.cache_buckets, role.row_buckets = (20,), (16, 24), (4, 8)
    for split in ("sft", "rl", "test"):
        config.task[f"{split}_words"], config.task[f"{split}_letters"] = (1, 2), (2, 3)
    config.rl.prompts_per_step, config.rl.samples_per_prompt = 4, 2
    return config
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """Path of a config file that is valid as it is and does not change with those of the project."""
    path = tmp_path_factory.mktemp("config") / "small.py"
    path.write_text(SMALL)
    return str(path)


# --------------------------------------------------------------------------------------------------- overrides


def test_overrides_take_the_type_of_the_default(small):
    config = load_config(f"{small}:7", [
        "rl.gamma=1", "rl.alpha_final=2e-3", "rl.generator_steps=12", "arm=grpo", "generator.init_from=1",
        "generator.use_chat=false", "verifier.use_chat=TRUE", "verifier.row_buckets=(2,4)",
        "generator.prompt_buckets=[8, 16]",
        "verifier.cache_buckets=()", "ablation.arms=('tango','grpo')", "compile_cache=",
        "generator.rewards=own.py:f", "verifier.rewards=a.py:f, b.py:g", "verifier.reward_weights=1,0.5",
        "generator.sft.optimizer.lr=1",
    ])
    assert config.seed == 7
    assert config.rl.gamma == 1.0 and isinstance(config.rl.gamma, float)
    assert (config.rl.alpha_final, config.rl.generator_steps, config.arm) == (0.002, 12, "grpo")
    assert config.generator.init_from == "1"  # a string stays one, whatever it looks like
    assert config.generator.use_chat is False and config.verifier.use_chat is True
    assert (config.verifier.row_buckets, config.generator.prompt_buckets) == ((2, 4), (8, 16))
    assert config.verifier.cache_buckets == () and config.compile_cache == ""
    assert config.ablation.arms == ("tango", "grpo")
    assert config.generator.rewards == ("own.py:f",) and config.verifier.rewards == ("a.py:f", "b.py:g")
    assert config.verifier.reward_weights == (1.0, 0.5)
    assert config.generator.sft.optimizer.lr == 1.0
    # Everything else is as the file has it.
    assert config.verifier.sft.optimizer.lr == default_config().verifier.sft.optimizer.lr
    assert config.generator.row_buckets == (4, 8)


def test_an_override_may_hold_an_equals_sign(small):
    assert load_config(small, ["generator.init_from=runs/lr=1"]).generator.init_from == "runs/lr=1"


@pytest.mark.parametrize("override, message", [
    ("rl.gama=1", r"unknown config key 'rl\.gama'; did you mean rl\.gamma\?"),
    ("generator.sft.step=1", r"'generator\.sft\.step'; did you mean generator\.sft\.steps\?"),
    ("verifer.temperature=1", r"'verifer\.temperature'; did you mean verifier\.temperature\?"),
    ("gamma.x=1", r"unknown config key 'gamma\.x'; did you mean"),
    ("seed.x=1", r"unknown config key 'seed\.x'"),
    # Nothing is near.
    ("zzzzzzzzzzzzzz=1", r"unknown config key 'z+'; see --keys for every key"),
    ("rl.gamma", r"--config\.rl\.gamma has no value: write --config\.key=value"),
    ("rl=1", r"--config\.rl is a group of keys: set one of them \(--keys=rl lists them\)"),
    ("seed=1.5", r"--config\.seed=1\.5 must be of type int, like its default 0"),
    ("seed=one", r"--config\.seed=one must be of type int"),
    ("seed=", r"--config\.seed= must be of type int"),
    ("seed=True", r"must be of type int"),
    ("rl.gamma=high", r"--config\.rl\.gamma=high must be of type float, like its default 0\.8"),
    ("rl.gamma=True", r"must be of type float"),
    ("generator.row_buckets=('a','b')", r"row_buckets=\('a','b'\) must be of type tuple"),
    ("task.sft_words=(1.5,2.5)", r"sft_words=\(1\.5,2\.5\) must be of type tuple"),
    ("verifier.reward_weights=1", r"reward_weights=1 must be of type tuple, like its default \(\): write \(1,\)"),
    ("generator.use_chat=1", r"must be of type bool, like its default False"),
    ("generator.use_chat=no", r"must be of type bool, like its default False: write true or false"),
    ("generator.row_buckets={[]:1}", r"row_buckets=\{\[\]:1\} must be of type tuple"),
    ("generator.row_buckets=" + "(" * 5000, r"row_buckets=\(+\.\.\. must be of type tuple"),
    ("rl.gamma=1" + "0" * 400, r"rl\.gamma=10+\.\.\. must be of type float"),
    ("seed=1" + "0" * 5000, r"seed=10+\.\.\. must be of type int"),
    ("=1", r"unknown config key ''"),
    ("generator.row_buckets=8", r"must be of type tuple, like its default \(4, 8\): write \(8,\)"),
    ("generator.row_buckets=8 16", r"must be of type tuple"),
])
def test_a_mistaken_override_says_what_is_wrong(small, override, message):
    with pytest.raises(ValueError, match=message):
        load_config(small, [override])


@pytest.mark.parametrize("text, message", [
    ("x = 1", r"has no function get_config\(\)"),
    (SMALL.replace("config.seed", "config.sed"), "sed"),
    (SMALL.replace("int(argument or 0)", "argument"), "seed"),  # text where a number belongs
    ("def get_config():\n    return 1", r"get_config returned 1, not a ConfigDict"),
])
def test_a_mistaken_config_file_is_named(tmp_path, text, message):
    path = tmp_path / "mistaken.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"mistaken\.py.*{message}"):
        load_config(str(path))


def test_a_missing_config_file_is_named():
    with pytest.raises(ValueError, match=r"'configs/none\.py' is not a Python file that exists, nor a shipped"):
        load_config("configs/none.py:3")


def test_the_config_is_locked(small):
    config = load_config(small)
    for node in (config, config.rl, config.generator.loss):
        with pytest.raises(AttributeError):
            node.no_such_key = 1


# -------------------------------------------------------------------------------------------------- validation

MISTAKES = [
    ("arm=tangos", r"arm='tangos' is not one of tango, grpo, fixed_verifier,"),
    ("arm=tnago", r"arm='tnago' is not one of .* \(did you mean tango\?\); your own arm is FILE\.py:name"),
    ("generator.loss.algorithm=grop", r"'grop' is not one of grpo, .* \(did you mean grpo\?\); your own algorithm is"),
    ("rl.samples_per_prompt=1",
     r"generator\.loss\.algorithm=grpo compares the responses to a prompt, and the turn takes only one \(rl\.samp"),
    ("rl.samples_per_prompt=1 verifier.loss.algorithm=rloo", r"verifier\.loss\.algorithm=rloo compares .* raise it to"),
    ("generator.loss.algorithm=own.py:mine generator.loss.step_norm=minimum",
     r"step_norm=minimum works with grpo, .* not with generator\.loss\.algorithm=own\.py:mine: set"),
    ("generator.reward_weights=(1,0.5)",
     r"generator\.reward_weights=\(1\.0, 0\.5\) is of length 2, and generator\.rewards=\(\) of length 0: give"),
    ("verifier.rewards=a.py:f,b.py:f", r"verifier\.rewards=.* has 2 functions named 'f', .* rename one"),
    ("generator.rewards=none.py:f", r"generator\.rewards=none\.py:f: there is no file none\.py"),
    ("generator.reward_weights=(1,nan)", r"generator\.reward_weights=\(1,nan\) must be of type tuple"),
    ("generator.reward_weights=(1000,)", r"generator\.reward_weights=.*1000\.0 must lie between 0\.0 and 100\.0"),
    ("generator.stop_at_first_error=True", r"generator\.stop_at_first_error=True: only the verifier judges"),
    ("verifier.stop_at_first_error=True verifier.template=math",
     r"stop_at_first_error=True, and verifier\.template=math asks to judge all steps: set verifier\.templ"),
    ("verifier.template=math_first_error",
     r"stop_at_first_error=False, and verifier\.template=math_first_error asks to stop at .*template=math, or your"),
    ("arm=meta_judged verifier.stop_at_first_error=True", r"arm=meta_judged is rewarded by judgements of every"),
    ("rl.step_reward=soft", r"rl\.step_reward='soft' is not one of mark, probability"),
    ("rl.step_reward=probability generator.loss.step_norm=first_error",
     r"rl\.step_reward=probability replaces the marks, .* set rl\.step_reward=mark, or another step_norm"),
    ("task.name=sums", r"task\.name='sums' is not one of last_letter"),
    ("task.sft_words=(0,2)", r"task\.sft_words=\(0, 2\): 0 must be at least 1"),
    ("task.rl_letters=(3,2)", r"task\.rl_letters=\(3, 2\) must be \(low, high\) with 1 <= low <= high"),
    ("task.test_letters=(3,)", r"task\.test_letters=\(3,\) must be"),
    ("task.name=state_tracking task.rl_swaps=(3,2)", r"task\.rl_swaps=\(3, 2\) must be \(low, high\) with 1 <= low"),
    ("task.name=state_tracking", r"cannot hold the longest generator response of task\.sft_swaps=\(2, 8\): 84 tokens"),
    ("task.hard_error=1.5", r"task\.hard_error=1\.5 must lie between 0\.0 and 1\.0"),
    ("task.claim_noise=1.5", r"task\.claim_noise=1\.5 must lie between"),
    ("task.reading_error=-0.1", r"task\.reading_error=-0\.1 must lie between"),
    ("compare_with=none.csv", r"compare_with: none\.csv cannot be read \(No such file or directory\): name the CSV"),
    ("arm=fixed_verifier_warm rl.warmup_steps=0", r"rl\.warmup_steps=0 has none: raise it, or choose an arm"),
    ("arm=fixed_generator rl.warmup_steps=0 rl.generator_steps=2", r"arm=fixed_generator has no turn with rl\.warmup_"),
    ("rl.alpha_schedule=signal rl.dynamic_sampling=2", r"signal follows the share of groups whose answers are all r"),
    ("rl.practice=half_right rl.dynamic_sampling=2", r"half_right counts right answers, and rl\.dynamic_sampling=2 dr"),
    ("rl.generator_steps=0", r"rl\.generator_steps=0 must be at least 1"),
    ("rl.samples_per_prompt=0", r"rl\.samples_per_prompt=0 must be at least 1"),
    ("rl.warmup_steps=-1", r"rl\.warmup_steps=-1 must be at least 0"),
    ("rl.alpha_initial=2.0", r"rl\.alpha_initial=2\.0 must lie between 0\.0 and 1\.0"),
    ("seed=-1", r"seed=-1 must lie between 0 and 4294967295"),
    ("task.data_seed=-3", r"task\.data_seed=-3 must lie between 0 and 4294967295"),
    ("ablation.arms=()", r"ablation\.arms is empty"),
    ("ablation.workers=0", r"ablation\.workers=0 must be at least 1"),
    ("ablation.seeds=(1,2,1)", r"ablation\.seeds=\(1, 2, 1\) names one twice: take it out"),
    ("rl.gamma=1e400", r"rl\.gamma=inf must lie between"),
    ("rl.alpha_schedule=step", r"rl\.alpha_schedule='step' is not one of exponential, linear, cosine, none"),
    ("rl.alpha_final=0.0", r"cannot start or end at 0 \(alpha_initial=0\.1, alpha_final=0\.0\): use .*=linear"),
    ("eval.pool=0", r"eval\.pool=0 must be at least 1"),
    ("generate.samples=0", r"generate\.samples=0 must lie between 1 and 1024"),
    ("generate.samples=3", r"generator\.row_buckets ends in 8, which is not a multiple of generate\.samples=3: choose"),
    ("generate.temperature=-0.1", r"temperature=-0\.1 must be 0, or lie between 1e-06 and 1000000\.0; 0 is greedy"),
    ("generator.top_p=0.0", r"generator\.top_p=0\.0 must be above 0\.0 and at most 1\.0"),
    ("generate.problems=-1", r"generate\.problems=-1 must be at least 0"),
    ("checkpoint.patience=3", r"checkpoint\.patience=3 waits .* checkpoint\.keep_best is empty: name its"),
    ("fork_of=runs/x generator.sft.steps=3", r"fork_of=runs/x begins after .* set generator\.init_from=runs/x, or use"),
    ("checkpoint.keep=0", r"checkpoint\.keep=0 must be at least 1"),
    ("rollouts.every=-1", r"rollouts\.every=-1 must be at least 0"),
    ("ablation.arms=('tango','none')", r"ablation\.arms='none' is not one of tango,"),
    ("ablation.arms=('a.py:mine','b.py:mine')", r"has two arms with the same name, .* folder: rename one"),
    ("generator.template=maths", r"generator\.template='maths' is neither one of math, plain, last_letter nor a file"),
    ("generator.model.remat=some", r"generator\.model\.remat='some' is not one of none, dots, full"),
    ("verifier.model.attention=flash", r"verifier\.model\.attention='flash' is not one of auto, xla, cudnn, splash"),
    ("verifier.model.decode_attention=splash",
     r"verifier\.model\.decode_attention='splash' is not one of auto, xla, cudnn, paged"),
    ("verifier.model.head_precision=high",
     r"model\.head_precision='high' is not one of highest, bfloat16_x3, bfloat16$"),
    ("generator.model.sample_cache_dtype=int4",
     r"generator\.model\.sample_cache_dtype='int4' is not one of \(empty\), int8"),
    ("verifier.model.sample_weight_dtype=int8 verifier.loss.importance_cap=0",
     r"verifier\.model\.sample_weight_dtype=int8 makes .* verifier\.loss\.importance_cap=0 does not correct for this"),
    ("verifier.model.compute_dtype=float16",
     r"verifier\.model\.compute_dtype='float16' is not one of float32, bfloat16: float16 needs loss scaling"),
    ("generator.mesh.grad_reduce_dtype=float16",
     r"generator\.mesh\.grad_reduce_dtype='float16' is not one of float32, bfloat16: "),
    ("verifier.model.num_layers=0", r"verifier\.model\.num_layers=0 must be at least 1"),
    ("generator.model.num_heads=1", r"num_heads=1 must be a multiple of num_kv_heads=2"),
    ("generator.model.width=36", r"head_dim=9 must be even"),
    ("generator.model.num_heads=6", r"num_heads=6 does not divide width=128: choose a number that does"),
    ("generator.prompt_buckets=(20,10)", r"prompt_buckets=\(20, 10\) must ascend and stay below max_prompt=40"),
    ("verifier.cache_buckets=(36,)", r"verifier\.cache_buckets=\(36,\) must ascend and stay below max_response=36"),
    ("verifier.cache_buckets=(0,8)", r"verifier\.cache_buckets=\(0, 8\): 0 must be at least 1"),
    ("generator.rows_per_micro_batch=0", r"generator\.rows_per_micro_batch=0 must be at least 1"),
    ("verifier.logp_chunk=-1", r"verifier\.logp_chunk=-1 must be at least 0"),
    ("verifier.prompts_per_micro_batch=-1", r"verifier\.prompts_per_micro_batch=-1 must be at least 0"),
    ("verifier.prompts_per_micro_batch=0 verifier.max_prompt=99 verifier.pack_length=98",
     r"pack_length=98 cannot hold a response of max_response=\d+ and a prompt of max_prompt=99: set it to 0"),
    ("verifier.sft.rows_per_micro_batch=0", r"verifier\.sft\.rows_per_micro_batch=0 must be at least 1"),
    ("generator.pack_length=36", r"generator\.pack_length=36 cannot hold a response of max_response=36 .* raise it"),
    ("generator.row_buckets=()", r"generator\.row_buckets=\(\) must ascend and not be empty"),
    ("generator.row_buckets=(8,4)", r"generator\.row_buckets=\(8, 4\) must ascend"),
    ("verifier.row_buckets=(4,7)", r"verifier\.row_buckets ends in 7, .* multiple of rl\.samples_per_prompt=2"),
    ("generator.cache_tokens=-1", r"generator\.cache_tokens=-1 must be at least 0"),
    ("verifier.cache_tokens=75",
     r"verifier\.cache_tokens=75 has no room for one row of max_prompt 40 \+ max_response 36 = 76 tokens: raise it"),
    ("generator.loss.minibatches=3",
     r"generator\.loss\.minibatches=3 does not divide rl\.prompts_per_step=4 \(batch of 8 rows\)"),
    ("generator.loss.algorithm=ppo", r"generator\.loss\.algorithm='ppo' is not one of grpo, rloo, reinforce_pp"),
    ("generator.loss.aggregation=sum", r"loss\.aggregation='sum' is not one of token_mean, seq_mean, seq_sum_norm"),
    ("generator.loss.ratio=word", r"generator\.loss\.ratio='word' is not one of token, sequence"),
    ("verifier.loss.kl_kind=k4", r"verifier\.loss\.kl_kind='k4' is not one of k1, k2, k3"),
    ("verifier.loss.clip_low=1.2", r"verifier\.loss\.clip_low=1\.2 must lie between 0\.0 and 1\.0"),
    ("verifier.loss.kl_coef=-1", r"verifier\.loss\.kl_coef=-1\.0 must be at least 0"),
    ("verifier.loss.epochs=0", r"verifier\.loss\.epochs=0 must be at least 1"),
    ("generator.temperature=0", r"generator\.temperature=0\.0 must lie between .*: a greedy policy has nothing to"),
    ("generator.top_p=0", r"generator\.top_p=0\.0 must be above 0\.0 and at most 1\.0"),
    ("generator.top_p=1.1", r"generator\.top_p=1\.1 must be above 0\.0 and at most 1\.0"),
    ("generator.top_k=-1", r"generator\.top_k=-1 must be at least 0"),
    ("generator.sft.optimizer.schedule=step",
     r"generator\.sft\.optimizer\.schedule='step' is not one of constant, cosine"),
    ("verifier.optimizer.lr=0", r"verifier\.optimizer\.lr=0\.0 must be above 0"),
    ("generator.sft.optimizer.b2=1.0", r"generator\.sft\.optimizer\.b2=1\.0 must be at least 0\.0 and below 1\.0"),
    ("generator.sft.steps=-1", r"generator\.sft\.steps=-1 must be at least 0"),
    ("generator.sft.start=generator", r"generator\.sft\.start=generator: only the verifier's stage 1 can"),
    ("verifier.sft.start=verifier", r"verifier\.sft\.start='verifier' is not one of fresh, generator"),
    ("verifier.sft.start=generator verifier.model.width=64", r"sft\.start=generator needs .* to be the same"),
    ("generator.sft.eval_every=0", r"generator\.sft\.eval_every=0 must be at least 1"),
    (f"generator.prompt_buckets=() generator.max_prompt={LONGEST['generator prompt'] - 1}",
     r"generator\.max_prompt=\d+ cannot hold the longest generator prompt of task\.sft_words=\(1, 2\), "
     rf"task\.sft_letters=\(2, 3\): {LONGEST['generator prompt']} tokens; raise the limit or shorten the problems"),
    (f"generator.cache_buckets=() generator.max_response={LONGEST['generator response'] - 1}",
     rf"max_response=\d+ cannot hold the longest generator response .*: {LONGEST['generator response']} tokens"),
    (f"verifier.prompt_buckets=() verifier.max_prompt={LONGEST['verifier prompt'] - 1}",
     rf"verifier\.max_prompt=\d+ cannot hold the longest verifier prompt .*: {LONGEST['verifier prompt']} tokens"),
    (f"verifier.cache_buckets=() verifier.max_response={LONGEST['verifier response'] - 1}",
     rf"max_response=\d+ cannot hold the longest verifier response .*: {LONGEST['verifier response']} tokens"),
    # Of marks without remarks: 7 tokens a step, 4 of two tags on their lines, 5 of the verdict, and the end.
    ("arm=scored verifier.cache_buckets=() verifier.max_response=23",
     r"verifier\.max_response=23 cannot hold the longest verifier response of task\.sft_words=.*: 24 tokens; raise"),
    ("task.test_letters=(2,40)", r"cannot hold .*task\.test_words=\(1, 2\), task\.test_letters=\(2, 40\)"),
    (f"generator.sft.pack_length={SFT_LENGTH - 1}",
     rf"generator\.sft\.pack_length=\d+ cannot hold the longest training sequence of the sft split: {SFT_LENGTH} tok"),
    ("generator.checkpoint=none.gguf", r"generator\.checkpoint: checkpoint none\.gguf does not exist"),
    ("verifier.checkpoint=a/b/c", r"verifier\.checkpoint: .*a/b/c: there is no such folder; give a run's workdir"),
    # Its policy was trained by RL, which stage 1 would undo.
    (f"generator.checkpoint={FIXTURES / 'workdir'} generator.sft.steps=5",
     r"is a run, and generator\.sft\.steps=5 would .* set the steps to 0 to go on"),
    ("verifier.use_chat=True", r"verifier\.use_chat=True needs a verifier\.checkpoint"),
    ("verifier.sft.start=generator verifier.checkpoint=a/b", r"needs model and checkpoint of both roles to be the"),
    ("rl.trust=(0.4,)", r"rl\.trust=\(0\.4,\) must be two F1 scores that ascend, such as \(0\.4, 0\.55\), or empty"),
    ("rl.trust=(1,0)", r"rl\.trust=\(1\.0, 0\.0\) must be two F1 scores that ascend"),
    ("rl.warmup_until=0.5", r"rl\.warmup_until=0\.5 waits for trust in the verifier, and rl\.trust=\(\) does not"),
    ("rl.trust=(8,14)", r"rl\.trust=\(8\.0, 14\.0\): 8\.0 must lie between 0\.0 and 1\.0"),
    ("generator.model.lora.rank=4", r"generator\.model\.lora\.rank=4 puts adapters on a model of random weights"),
    ("generator.adapter=none", r"generator\.adapter=none needs generator\.model\.lora\.rank above 0, the"),
    ("generator.adapter=generator", r"generator\.adapter=generator: only the verifier can be the generator's policy"),
    ("verifier.adapter=generator arm=fixed_verifier", r"^arm=fixed_verifier keeps a role fixed, and with verifier\.ad"),
    ("verifier.adapter=generator verifier.model.width=64", r"one policy, but generator and verifier differ in model"),
    ("verifier.sft.start=generator generator.sft.full=True " + " ".join(
        f"{role}.model.lora.rank=4 {role}.checkpoint=a/b {role}.sft.steps=3" for role in ("generator", "verifier")),
     r"generator\.sft\.full=True and verifier\.sft\.full=False: the verifier's stage 1 continues from the"),
    ("arm=self_verify verifier.model.width=64", r"arm=self_verify makes both roles one policy, but generator and ver"),
    ("arm=self_verify verifier.adapter=a/b",
     r"starts from generator\.adapter='', and verifier\.adapter=a/b is another: leave it empty, or give both the same"),
    ("arm=self_verify generator.sft.steps=2 verifier.init_from=a/b verifier.sft.steps=3",
     r"generator and verifier differ in init_from: give both the same"),
    ("arm=self_verify generator.sft.steps=2 verifier.init_from=a/b verifier.sft.steps=0",
     r"generator and verifier differ in init_from: give both the same"),
    ("arm=self_verify generator.init_from=a/b verifier.sft.steps=3",
     r"generator and verifier differ in init_from: give both the same"),
    ("generator.checkpoint=a verifier.checkpoint=a verifier.model.lora.rank=2 verifier.adapter=p "
     "verifier.sft.start=generator verifier.sft.steps=1", r"verifier\.adapter=p would not be read: its"),
    ("arm=self_verify generator.checkpoint=a verifier.checkpoint=a generator.model.lora.rank=2 "
     "verifier.model.lora.rank=2 generator.adapter=p verifier.sft.full=True", r"generator\.adapter=p would not be"),
    ("arm=self_verify generator.checkpoint=a verifier.checkpoint=a generator.model.lora.rank=2 "
     "verifier.model.lora.rank=2 generator.adapter=p verifier.init_from=x/y", r"generator\.adapter=p would not be"),
    ("arm=second_try generator.max_prompt=20", r"shows the generator a solution and its verification, up to \d+ "
     r"tokens in addition to the problem, and generator\.max_prompt=20 is too small: raise it"),
    ("arm=meta_judged verifier.max_prompt=70", r"shows the verifier a solution .* verifier\.max_prompt=70 is too"),
    ("arm=no_labels rl.judge=failed", r"arm=no_labels labels solutions without grades, and rl\.judge=failed and"),
    ("arm=no_labels rl.trust=(0.4,0.55)",
     r"rl\.trust=\(0\.4, 0\.55\) need grades: set rl\.judge=all and rl\.trust=\(\)"),
    ("arm=no_labels rl.samples_per_prompt=1 generator.loss.algorithm=reinforce_pp "
     "verifier.loss.algorithm=reinforce_pp", r"by the majority answer .*samples_per_prompt=1 gives only one answer"),
    ("arm=taught_verifier verifier.loss.kl_coef=0",
     r"uses the reference policy of the verifier as its teacher, and verifier\.loss\.kl_coef=0 removes it: set"),
    ("arm=taught_verifier verifier.top_p=0.9", r"verifier\.top_p=0\.9 and verifier\.top_k=0 leave tokens out: set"),
    ("arm=taught_verifier verifier.max_response=2097152 verifier.pack_length=2100000",
     r"the teacher of arm=taught_verifier would score up to \d+ tokens of a turn, more than 16777215: lower rl\.p"),
    ("rl.judge=silent rl.dynamic_sampling=1", r"judge=silent judges groups whose answers are all right or all wr"),
    ("arm=second_try generator.loss.algorithm=reinforce_pp",
     r"groups of different sizes, and generator\.loss\.algorithm=reinforce_pp cannot: choose an algo"),
    ("rl.judge=failed generator.loss.algorithm=reinforce_pp", r"rl\.judge=failed leaves solutions without step rew"),
    ("rl.judge=some", r"rl\.judge='some' is not one of all, silent, failed"),
    ("task.min_steps=-1", r"task\.min_steps=-1 must be at least 0"),
    ("loggers.wandb=me/tango", r"loggers\.wandb='me/tango' is no project name: W&B allows no / in it"),
    ("task.name=math", r"generator\.checkpoint is empty, and task\.name=math has no tokenizer: name a folder"),
    (f"{MATH} generator.sft.steps=1 task.stage_one=", r"generator\.sft\.steps=1 needs text to imitate: set task"),
    (f"{MATH} arm=grpo_curriculum", r"arm=grpo_curriculum needs a task with a curriculum; task\.name=math has none"),
    ("arm=grpo_curriculum", r"arm=grpo_curriculum needs task\.verifier_words, the size of the short problems"),
    ("task.verifier_words=(3,4)", r"task\.verifier_words=\(3, 4\) begins above .* task\.rl_words=\(1, 2\): lower it"),
    ("task.verifier_words=(2,)", r"task\.verifier_words=\(2,\) must be .*, or empty"),
    ("rl.dynamic_sampling=-1", r"rl\.dynamic_sampling=-1 must be at least 0"),
    (f"{MATH} arm=gold_steps", r"step labels; task\.name=math has none: .* task\.name=last_letter or state_tracking"),
    (f"{MATH} seed={2**32}", r"seed=4294967296 must lie between 0 and 4294967295"),
    ("task.train=rows.jsonl", r"task\.train=rows\.jsonl is not read by task\.name=last_letter, which makes"),
    (f"{MATH} task.train={ROWS / 'math500.jsonl'}",
     r"task\.stage_one=gsm8k needs worked answers .* have the format math: .* generator\.sft\.steps=0 .*own_problems"),
    (f"{MATH} task.test={ROWS / 'tagged.jsonl'}",
     r"task\.test: .*keys wanted of a row in the format math: question or"),
    (f"{MATH} task.test={ROWS / 'gsm8k.jsonl'}",
     r"task\.test=.* is task\.train as well, .* leave it empty, and task\.validation problems are held out, or name"),
    (f"{MATH} task.validation=0", r"task\.validation=0 must be at least 1"),
    (f"{MATH} task.train=", r"task\.train is empty: name a problem file, a hub id or one of gsm8k"),
    (f"{MATH} task.train=none.jsonl", r"task\.train: data file none\.jsonl does not exist"),
    (f"{MATH} task.test=hub:a", r"task\.test: 'hub:a' is not a hub id; write hub:owner/name"),
    (f"{MATH} task.validation=4",
     r"task\.train=.* has 7 problems; a batch takes rl\.prompts_per_step=4, and 4 are set aside \(task\.validation\)"),
    (f"{MATH} task.test= task.validation=2", r"has 7 problems; .*prompts_per_step=4, and 4 are set aside"),
    (f"{MATH} task.stage_one=none.jsonl", r"data file none\.jsonl does not exist"),
    (f"{MATH} task.stage_one={ROWS / 'gsm8k.jsonl'}", r"line 1: 'solution' is missing; keys found: question, answer;"),
    (f"{MATH} task.stage_one=hub:a", r"'hub:a' is not a hub id"),
    (f"{MATH} task.stage_one=self generator.sft.steps=0 verifier.sft.steps=0",
     r"task\.stage_one=self, and generator\.sft\.steps=0 and verifier\.sft\.steps=0 imitate nothing: set the updates"),
    (f"{MATH} task.stage_one=self verifier.sft.steps=1 verifier.stop_at_first_error=true verifier.template="
     "math_first_error", r"task\.stage_one=self makes verifications that judge all steps, and verifier\.stop_at_"),
    (f"{MATH} task.stage_one=self generator.sft.steps=1 task.examples=none.jsonl",
     r"task\.examples: data file none\.jsonl does not exist"),
    (f"{MATH} task.stage_one=self generator.sft.steps=1 task.examples={ROWS / 'gsm8k.jsonl'}",
     r"task\.examples: .*line 1: 'solution' is missing"),
    (f"{MATH} task.stage_one=self generator.sft.steps=1 task.min_steps=4", r"the shipped examples: none can be shown "
     r"to the generator, which needs a solution .* task\.min_steps=4 steps: give such examples in a file, task\.exam"),
    (f"{MATH} task.examples={ROWS / 'tagged.jsonl'}", r"task\.examples=.* is read with task\.stage_one=self only, and "
     r"it is 'gsm8k': leave it out"),
    ("task.stage_one=self", r"task\.stage_one=self is not read by task\.name=last_letter, which makes its own"),
    ("task.name=math:floor task.stage_one=self", r"task\.stage_one=self needs task\.name=math, and task\.name=math:f"),
    ("self.samples=0", r"self\.samples=0 must lie between 1 and 1024"),
    (f"{MATH} task.stage_one={ROWS / 'tagged.jsonl'} rl.prompts_per_step=1 task.validation=3",
     r"tagged\.jsonl has 3 rows, and task\.validation=3 sets all of them aside"),
]


def test_text_to_imitate_from_a_file_of_its_own_takes_no_problems(small):
    assert mistakes_in(small, f"{MATH} task.stage_one={ROWS / 'tagged.jsonl'} task.validation=1 rl.prompts_per_step=7 "
                              "generator.rows_per_micro_batch=1") == ()


def mistakes_in(small, overrides) -> tuple[str, ...]:
    """What is wrong with the settings, all of it."""
    try:
        validate(load_config(small, overrides.split()))
    except SettingsError as error:
        return error.messages
    return ()


@pytest.mark.parametrize("overrides, message", MISTAKES, ids=[overrides for overrides, _ in MISTAKES])
def test_a_mistaken_setting_is_refused(small, overrides, message):
    messages = mistakes_in(small, overrides)
    assert any(re.search(message, found) for found in messages), messages
    assert not any("\n" in found for found in messages)


@pytest.mark.parametrize("overrides", [
    "arm=grpo",
    *(f"{what.split()[0]}.{kind}_buckets=() {what.replace(' ', '.max_')}={tokens}"
      for what, tokens in LONGEST.items() for kind in ("prompt" if what.endswith("prompt") else "cache",)),
    f"generator.sft.pack_length={SFT_LENGTH}", "generator.pack_length=37",
    "rl.alpha_final=0.0 rl.alpha_schedule=linear", "generator.loss.minibatches=2",
    MATH, f"{MATH} task.train=gsm8k_train task.test=hub:openai/gsm8k:main/test", f"{MATH} task.stage_one=hub:a/b/train",
    f"{MATH} generator.max_prompt=9 generator.prompt_buckets=()",  # counted by the checkpoint's tokenizer, at start
    # The task's step labels are no judgements.
    "arm=gold_steps rl.step_reward=probability generator.loss.step_norm=first_error",
    "arm=gold_steps rl.judge=failed rl.dynamic_sampling=1",
    "arm=gold_steps rl.judge=failed generator.loss.algorithm=reinforce_pp generator.loss.step_norm=elements",
    # The verifier takes its stage 1 from another run.
    f"{MATH} task.stage_one=self generator.sft.steps=1 verifier.sft.steps=1 verifier.init_from=a "
    "verifier.stop_at_first_error=true verifier.template=math_first_error",
    # It reads marks, in no batch of rows.
    "arm=scored rl.samples_per_prompt=4 verifier.row_buckets=(6,)",
    "arm=scored verifier.cache_buckets=() verifier.max_response=24",
    "verifier.sft.optimizer.schedule=cosine",
    "verifier.sft.start=generator", "rl.warmup_steps=0", "generator.top_k=5 generator.top_p=0.9", "rollouts.every=0",
])
def test_settings_at_their_limits_pass(small, overrides):
    assert mistakes_in(small, overrides) == ()


def test_every_check_is_among_the_mistakes(small, monkeypatch):
    """Each call of a checking method in the two modules, by its line, fails in one of the cases above."""
    checks = {"require", "one_of"}
    calls = {
        (module.__file__, node.lineno, node.end_lineno)
        for module in (validation, task_validation)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in checks
        and getattr(node.func.value, "id", "") == "mistakes"
    }
    assert len(calls) > 30
    failed = set()  # (file, line) of the calls that found something wrong

    def recorded(method):
        def check(self, *args):
            is_right, caller = method(self, *args), sys._getframe(1)
            if not is_right:
                failed.add((caller.f_code.co_filename, caller.f_lineno))
            return is_right

        return check

    for name in checks:
        monkeypatch.setattr(Mistakes, name, recorded(getattr(Mistakes, name)))
    for overrides, _ in MISTAKES:
        mistakes_in(small, overrides)
    assert {call for call in calls if not any(call[0] == file and call[1] <= line <= call[2] for file, line in failed)
            } == set()


def test_all_mistakes_are_told_at_once(small, capsys):
    wrong = ["rl.gamma=-1.0", "arm=tangos", "generator.loss.algorithm=ppo", "verifier.row_buckets=(8,4)",
             "task.rl_words=(3,2)", "generator.template=maths", "verifier.sft.start=verifier"]
    messages = mistakes_in(small, " ".join(wrong))
    found = {override.partition("=")[0] for override in wrong if any(override.partition("=")[0] in m for m in messages)}
    assert found == {override.partition("=")[0] for override in wrong} and len(messages) == len(wrong)
    with pytest.raises(SystemExit) as stopped:
        parse_command_line("train", "doc", [f"--config={small}", *(f"--config.{item}" for item in wrong)], "runs/x")
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and lines == [f"error: {message}" for message in messages]


def test_mistakes_of_the_command_line_hide_none_of_the_settings(small, capsys):
    wrong = ["--nope=3", "--config.rl.generator_step=1", "--config.seed=x", "--config.arm=tangos",
             "--config.generator.rewards=own.py:f", "--workdir="]
    with pytest.raises(SystemExit):
        parse_command_line("train", "doc", [f"--config={small}", *wrong, "--print-config"], "runs/x")
    captured = capsys.readouterr()
    said = captured.err.splitlines()
    beginnings = ("--workdir is empty", "unknown argument '--nope=3'", "unknown config key 'rl.generator_step'",
                  "--config.seed=x must be", "arm='tangos' is not one", "generator.rewards=own.py:f: there is no file")
    assert len(said) == len(beginnings) and captured.out == ""
    assert all(line.startswith(f"error: {text}") for line, text in zip(said, beginnings, strict=True)), said


def test_a_misspelled_option_is_named_beside_the_one_that_is_missing():
    parser = Parser("sample", "doc")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("words", nargs="*")
    missing = "the following arguments are required: --checkpoint; --help shows the usage"
    for parse in (parser.parse_args, parser.parse_overrides):
        with pytest.raises(SettingsError) as error:
            parse(["--checkpont=x"])
        assert set(error.value.messages) == {
            "unknown argument '--checkpont=x'; did you mean --checkpoint? --help shows the usage", missing}
        with pytest.raises(ValueError, match=f"^{missing}$"):
            parse(["word"])


def test_what_depends_on_a_number_out_of_range_waits_for_it(small):
    """A division by zero, say, is no second mistake."""
    for wrong in ("rl.samples_per_prompt=0", "generate.samples=0", "generator.model.num_kv_heads=0",
                  "generator.loss.minibatches=0", "generator.row_buckets=(0,)", "generator.max_prompt=0"):
        [message] = mistakes_in(small, wrong)
        assert message.startswith(wrong.partition("=")[0])


def test_unknown_overrides_are_told_at_once(small):
    with pytest.raises(SettingsError) as error:
        load_config(small, ["rl.gama=1", "seed=1.5", "rl.gamma=0.5", "zzz=1"])
    assert [message.split()[0] for message in error.value.messages] == ["unknown", "--config.seed=1.5", "unknown"]


def test_buckets_that_no_longer_fit_a_shortened_limit_are_dropped_with_a_note(small):
    config = load_config(small, ["generator.max_response=24", "verifier.max_prompt=20"])
    buckets = (config.generator.cache_buckets, config.verifier.prompt_buckets, config.verifier.cache_buckets)
    assert buckets == ((16,), (), (16, 24))
    assert config.notes.splitlines() == [
        "generator.cache_buckets=(16, 24) became (16,), below generator.max_response=24",
        "verifier.prompt_buckets=(20,) became (), below verifier.max_prompt=20",
    ]
    assert load_config(small, ["generator.max_response=40"]).notes == ""
    # Those that the command line names are not.
    messages = mistakes_in(small, "generator.max_response=24 generator.cache_buckets=(16,24)")
    assert any("generator.cache_buckets=(16, 24) must ascend and stay below max_response=24" in m for m in messages)


def test_roles_have_the_same_keys():
    config = default_config()
    generator, verifier = flatten(config.generator), flatten(config.verifier)
    assert list(generator) == list(verifier)
    assert generator == verifier


def test_every_key_is_read_by_the_program():
    """By attribute, or by a subscript with an f-string; a name in a list of names to check is not enough."""
    names, patterns = set(), []
    for path in (ROOT / "tango_jax").rglob("*.py"):
        if path.name in ("config.py", "defaults.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.JoinedStr):
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else "[a-z]+" for p in node.slice.values]
                patterns.append(re.compile("".join(parts)))
    names |= {f"{split}_{size}" for module in SYNTHETIC.values() for size in module.SIZES for split in SPLITS}
    leaves = [key.split(".")[-1] for key in flatten(default_config())]
    unread = {leaf for leaf in leaves if leaf not in names and not any(p.fullmatch(leaf) for p in patterns)}
    assert not unread


@pytest.mark.parametrize("path", CONFIGS, ids=[path.name for path in CONFIGS])
def test_the_projects_configs_pass(path):
    config = load_config(str(path))
    validate(config)
    assert set(flatten(config)) == set(flatten(default_config()))
    assert f"--config=configs/{path.name}" in path.read_text()  # its docstring says how to start it


# ------------------------------------------------------------------------------------------ resuming, command line


def test_other_settings_are_refused_where_a_run_was_made(small, tmp_path):
    path = tmp_path / "run" / "config.json"
    path.parent.mkdir()
    save_config(load_config(small), path)
    written = path.read_text()
    save_config(load_config(small), path)  # the same settings, tuples and all
    assert path.read_text() == written
    message = (r"run holds a run with other settings \(rl\.gamma: 0\.8 -> 0\.5; seed: 0 -> 1\): "
               rf"resume with the same ones \(--config={path} has them\), or choose another --workdir")
    with pytest.raises(ValueError, match=message):
        save_config(load_config(f"{small}:1", ["rl.gamma=0.5"]), path)
    assert path.read_text() == written
    assert json.loads(written)["generator.cache_buckets"] == [16, 24]
    with pytest.raises(ValueError, match="; to train on from its policies, give --from=.* and another --workdir"):
        save_config(load_config(small, ["rl.generator_steps=500"]), path)


def test_seeds_may_be_added_to_an_experiment(small, tmp_path):
    path = tmp_path / "config.json"
    save_config(load_config(small, ["ablation.seeds=(0,)"]), path)
    grid = {"seed": [0, 1]}
    save_config(load_config(small, ["ablation.seeds=(0, 1)", f"ablation.grid={grid}", "ablation.workers=2"]), path)
    stored = json.loads(path.read_text())
    assert (stored["ablation.seeds"], stored["ablation.grid"]) == ([0, 1], grid)
    with pytest.raises(ValueError, match="seed: 0 -> 1"):
        save_config(load_config(f"{small}:1"), path)


def test_some_settings_may_change_where_the_caller_says_so(small, tmp_path):
    path = tmp_path / "config.json"
    save_config(load_config(small), path)
    with pytest.raises(ValueError, match=r"generate\.samples: 1 -> 2"):
        save_config(load_config(small, ["generate.samples=2"]), path)
    save_config(load_config(small, ["generate.samples=2"]), path, may_change=("generate.",))


def test_a_run_may_go_on_with_other_loggers(small, tmp_path):
    path = tmp_path / "config.json"
    save_config(load_config(small), path)
    save_config(load_config(small, ["loggers.wandb=tango", "rollouts.every=7"]), path)
    assert json.loads(path.read_text())["rollouts.every"] == 7


def test_a_setting_that_an_earlier_version_lacked_had_its_default(small, tmp_path):
    path = tmp_path / "config.json"
    save_config(load_config(small), path)
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in saved.items() if key != "generator.rewards"}))
    check_config(load_config(small), path)
    path.write_text(json.dumps({key: value for key, value in saved.items() if key != "rl.gamma"}))
    with pytest.raises(ValueError, match=r"rl\.gamma: 0\.8 -> 0\.5"):
        check_same_settings(load_config(small, ["rl.gamma=0.5"]), path)


@pytest.mark.parametrize("read", [
    lambda path, config: check_same_settings(config, path), lambda path, config: read_config(path.parent),
    lambda path, config: stored_config(str(path)),
], ids=["resumed", "opened", "repeated"])
@pytest.mark.parametrize("text, message", [
    ('{"alarms.window": 5, "transcripts": 6}', r"config\.json has settings that this version does not know "
     r"\(alarms\.window=5, transcripts=6\): use the version that started the run, or begin a new one"),
    ('{"rl.label_count_decay": 0.5, "verifier.share_prompts": true}',
     r"does not know \(rl\.label_count_decay=0\.5\): use"),
    ('{"verifier.model.width": 128, "verifier.model.num_heads": 4, "verifier.model.head_dim": 64}',
     r"does not know \(verifier\.model\.head_dim=64\): use the version"),
    ("[1]", r"config\.json holds \[1\], not the settings of a run: name the workdir of a run, or its config"),
    ("{", r"config\.json cannot be read \(.*\): name the workdir of a run, or its config\.json"),
])
def test_settings_that_this_version_cannot_have_are_named_wherever_they_are_read(small, tmp_path, read, text, message):
    """A key that is gone is not ignored: it may have had a value with which the run computed something else."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read(path, load_config(small))
    assert "\n" not in str(error.value)


def test_keys_that_are_gone_are_read_where_they_had_what_now_holds(small, tmp_path):
    path = tmp_path / "config.json"
    save_config(load_config(small), path)
    settings, role = json.loads(path.read_text()), {"model.width": 128, "model.num_heads": 4}
    for key, value in GONE.items():
        value = value(role) if callable(value) else value
        settings |= {key.replace("ROLE", one): value for one in ROLES}
    path.write_text(json.dumps(settings | {"distributed.enabled": True, "rollouts.eval_problems": 3}))
    check_same_settings(load_config(small), path)
    assert flatten(stored_config(str(path))) == flatten(load_config(small))


def test_the_file_is_written_only_if_something_changed_and_never_by_a_check(small, tmp_path):
    path = tmp_path / "run" / "config.json"
    check_config(load_config(small), path)
    assert not path.parent.exists()
    keep_config(load_config(small), path)
    before = path.stat().st_ino
    keep_config(load_config(small), path)
    assert path.stat().st_ino == before
    keep_config(load_config(small, ["rollouts.every=7"]), path)
    assert path.stat().st_ino != before  # another file under the name: no reader, and no kill, sees half of it
    assert [file.name for file in path.parent.iterdir()] == ["config.json"]


def test_a_run_may_go_on_with_the_cache_of_another_machine(small, tmp_path):
    path = tmp_path / "config.json"
    save_config(load_config(small, ["compile_cache=/home/a"]), path)
    save_config(load_config(small, ["compile_cache=/scratch/b"]), path)
    assert json.loads(path.read_text())["compile_cache"] == "/scratch/b"


def test_another_runs_workdir_may_move_for_a_caller_that_compares_its_contents(small, tmp_path):
    path = tmp_path / "config.json"
    keep_config(load_config(small, ["generator.init_from=/a/ablation"]), path)
    moved, none = load_config(small, ["generator.init_from=/b/ablation"]), load_config(small)
    check_config(moved, path, may_move=ANY_PLACE)
    for config, may_move in ((moved, ()), (none, ANY_PLACE)):
        with pytest.raises(ValueError, match=r"generator\.init_from: /a/ablation -> "):
            check_config(config, path, may_move=may_move)
    keep_config(none, path)
    with pytest.raises(ValueError, match=r"generator\.init_from:  -> /b/ablation"):
        check_config(moved, path, may_move=ANY_PLACE)


@pytest.mark.parametrize("made", ["checkpoints/20", "sft/verifier/checkpoints/3", "summary.json", "parts"])
@pytest.mark.parametrize("content, reason", [(None, "is missing"), ('{"arm": "t', "cannot be"), ("", "cannot be")])
def test_settings_that_are_gone_are_no_settings_that_agree(small, tmp_path, made, content, reason):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    check_config(load_config(small), path)  # nothing was made with them yet
    (tmp_path / made).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as error:
        save_config(load_config(small), path)
    assert f"{path} {reason}" in str(error.value) and f"whether {tmp_path / made} was made" in str(error.value)
    assert "restore it from a copy" in str(error.value) and "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_command_line(small):
    arguments = [f"--config={small}:3", "--config.rl.gamma=0.5", "--workdir=~/a=b", "--config.arm=grpo"]
    config, workdir = parse_command_line("train", "doc", arguments, "runs/x")
    assert (config.seed, config.rl.gamma, config.arm, workdir) == (3, 0.5, "grpo", Path.home() / "a=b")
    assert parse_command_line("train", "doc", [f"--config={small}"], "runs/x")[1] == Path("runs/x")
    twice = ["--config=none.py", "--config.seed=1", "--workdir=a", "--config", small]
    twice += ["--config.seed", "2", "--workdir=b"]
    config, workdir = parse_command_line("train", "doc", twice, "runs/x")
    assert (config.seed, workdir) == (2, Path("b"))


def test_one_dash_serves_for_two(small):
    arguments = ["-config", f"{small}:3", "-config.rl.gamma", "-1", "-workdir=runs/y"]
    with pytest.raises(SystemExit, match=r"^error: rl\.gamma=-1\.0 must lie"):
        parse_command_line("train", "doc", arguments, "runs/x")
    arguments[3] = "0.5"
    config, workdir = parse_command_line("train", "doc", arguments, "runs/x")
    assert (config.seed, config.rl.gamma, workdir) == (3, 0.5, Path("runs/y"))


@pytest.mark.parametrize("argument, message", [
    ("--worksir=x", r"unknown argument '--worksir=x'; did you mean --workdir\? --help shows the usage"),
    ("--zzz=x", r"unknown argument '--zzz=x'; --help shows the usage"),
    ("--rl.gamma=1", r"unknown argument '--rl\.gamma=1'; did you mean --config\.rl\.gamma\? --help shows"),
    ("--rl.gama=1", r"did you mean --config\.rl\.gamma\?"),
    ("--generator-steps=3", r"did you mean --config\.rl\.generator_steps\?"),
    ("seed=1", r"unknown argument 'seed=1'; did you mean --config\.seed\?"),
    ("--model=x", r"unknown argument '--model=x'"),  # of own_problems alone
    ("--print_config=maybe", r"argument --print-config: 'maybe' must be true or false"),
    ("--workdir", r"argument --workdir: expected one argument; --help shows the usage"),
    ("--confi=x", r"unknown argument '--confi=x'"),
    ("--config.seed", r"--config\.seed has no value: write --config\.key=value"),
    ("tiny", r"unknown argument 'tiny'; did you mean --config=tiny\?"),
    ("--config=none.py", r"'none\.py' is not a Python file"),
    ("--config.rl.gama=1", r"did you mean rl\.gamma\?"),
    ("--config.rl.generator_steps=0", r"rl\.generator_steps=0 must be at least 1"),
])
def test_a_mistake_on_the_command_line_ends_with_one_line(small, argument, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_command_line("train", "doc", [f"--config={small}", argument], "runs/x")
    text = str(stopped.value)
    assert stopped.value.code == 2 and capsys.readouterr().err == f"{text}\n"
    assert text.startswith("error: ") and "\n" not in text
    assert re.search(message, text)


@pytest.mark.parametrize("module", [train, sft, ablate, generate], ids=["train", "sft", "ablate", "generate"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_the_usage(module, flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        module.main([flag])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert module.__doc__.strip() in text and "--config.rl.generator_steps=100 " in text
    assert "--config=FILE[:arg] [--config.key=value ...] [--workdir=DIR]" in text
    assert f"python -m {module.__name__}" in text


@pytest.mark.parametrize("words", ["train --help", "train --keys=", "report --help"])
def test_help_into_a_pipe_that_closes(words):
    """As `--help | head -1` does."""
    with subprocess.Popen(
        [sys.executable, "-m", *f"tango_jax.{words}".split()], cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as program:
        program.stdout.close()
        assert program.stderr.read() == "" and program.wait(120) == 0


@pytest.mark.parametrize("argument, code", [("--help", 0), ("--worksir=x", 2)])
def test_as_a_program(argument, code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tango_jax.train", "--config=tiny", f"--workdir={tmp_path / 'run'}", argument],
        cwd=ROOT, timeout=HANG_S, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        check=False,
    )
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)
    said = "error: unknown argument '--worksir=x'; did you mean --workdir? --help shows the usage\n"
    assert done.stderr == ("" if code == 0 else said)
    assert not (tmp_path / "run").exists()  # nothing is made before the settings are known to be right


def test_the_commonest_keys_of_the_help_exist_and_their_examples_are_right(small):
    for role in ("generator", "verifier"):
        for example in COMMON_KEYS:
            key, _, value = example.replace("ROLE", role).partition("=")
            assert str(flatten(load_config(small, [f"{key}={value}"]))[key]).replace(" ", "").lower() == (
                {"1e-6": "1e-06"}.get(value, value.lower()))
    text = " ".join(COMMON_KEYS.values()).replace("ROLE", "generator")
    named = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", text.replace("tango_jax/method/arms.py", ""))
    assert set(named) <= set(flatten(default_config())) and len(named) > 4


def test_words_of_options_may_be_joined_either_way_and_stand_alone(small, capsys):
    parser = Parser("train", "doc")
    parser.add_config(choices="")
    parser.add_argument("--max_new", type=int)
    parser.add_argument("--per-process", type=int)
    parser.add_flag("--use_chat", "help")
    for arguments in (["--max-new=3", "--per_process=4", "--use-chat"], ["--max_new", "3", "--per-process", "4",
                      "--use_chat", "true"], ["--max-new", "3", "--per_process", "4", "--use-chat=True"]):
        more = ["--config.seed", "-1", "--own-one=a=b", "--other", "c"]
        options, overrides = parser.parse_overrides([*arguments, *more])
        assert (options.max_new, options.per_process, options.use_chat) == (3, 4, True)
        assert overrides == ["seed=-1"] and options.config_arguments == {"own_one": "a=b", "other": "c"}
    assert parser.parse_overrides(["--use_chat=false"])[0].use_chat is False
    with pytest.raises(ValueError, match="argument --use_chat: 'maybe' must be true or false; --help shows"):
        parser.parse_overrides(["--use-chat=maybe"])


def test_every_setting_is_printed_and_nothing_is_done(small, tmp_path, capsys):
    arguments = [f"--config={small}", "--config.rl.gamma=0.5", "--print-config", f"--workdir={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as stopped:
        train.main(arguments)
    assert stopped.value.code == 0 and not (tmp_path / "run").exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("=")[0] for line in lines] == list(flatten(default_config()))
    assert "rl.gamma=0.5  # default: 0.8" in lines and "seed=0" in lines
    overrides = [line.partition("  # default")[0] for line in lines]
    again = [f"{key}={ast.literal_eval(value)}" for key, _, value in (line.partition("=") for line in overrides)]
    assert load_config(small, again) == load_config(small, ["rl.gamma=0.5"])
    with pytest.raises(SystemExit) as stopped:
        train.main([*arguments, "--config.rl.gamma=-1"])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and "rl.gamma=-1.0" in printed.out and printed.err.startswith("error: rl.gamma=-1.0")


def test_printed_sizes_of_a_model_with_a_checkpoint_say_that_they_are_not_used(small, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main([f"--config={small}", "--print-config", f"--config.generator.checkpoint={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    told = {line.partition("=")[0] for line in lines if line.endswith("  # not used: read from generator.checkpoint")}
    assert {f"generator.model.{name}" for name in ("width", "num_layers", "qk_norm")} <= told
    assert not told & {f"generator.model.{name}" for name in ("compute_dtype", "remat", "attention")}


def test_a_run_is_in_the_folder_of_its_configs_name_by_default(small):
    assert parse_command_line("train", "doc", [f"--config={small}"], "runs/NAME")[1] == Path("runs/small")
    assert parse_command_line("train", "doc", ["--config=last_letter"], "runs/NAME")[1] == Path("runs/last_letter")


@pytest.mark.parametrize("group, key", [("generator", "rewards"), ("verifier", "rewards"), ("task", "grader")])
def test_a_function_that_is_assigned_to_a_key_is_answered_in_one_line(group, key):
    config = default_config()
    for one in (config, config.copy_and_resolve_references()):
        with pytest.raises(ValueError, match=rf"^{key}=len: a setting takes the name of a function, FILE\.py:name or"):
            one[group][key] = len
