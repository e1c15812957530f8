"""Every key of the configuration; role_defaults.py has those of the two roles."""

from typing import Any

import ml_collections

from tango_jax.role_defaults import ROLE
from tango_jax.runtime.keys import (
    COUNT,
    COUNT_OR_NONE,
    MAX_SAMPLES,
    SEED,
    SHARE,
    TEMPERATURE,
    WEIGHT,
    Change,
    Group,
    Key,
    OneOf,
    Range,
    flat_keys,
)

NAMES_A_FUNCTION = "a setting takes the name of a function, FILE.py:name or package.module:name"

TASK: Group = {
    "name": Key("last_letter", None, "last_letter or state_tracking (synthetic), math (problems from files), or your "
                "function from the configuration to a Task, FILE.py:name or package.module:name "
                "(tasks/task.py)."),
    "data_seed": Key(0, SEED, "Seed of stage 1's text, the test problems and the fixed pool. Training problems depend "
                     "on it and on seed."),
    "grader": Key("", None, "A function (problem, answer) -> bool, FILE.py:name or package.module:name, that decides "
                  "whether an answer is right (tasks/own_grader.py). Empty: the answer is compared with the gold "
                  "answer."),
    "min_steps": Key(2, COUNT_OR_NONE, "A response with fewer step blocks gets a lower format score. Use 3 for math."),
    "train": Key("", None, "math: problem files (JSONL, JSON, parquet), hub ids (data/rows.py) or names in "
                 "data/problem_sets.py."),
    "test": Key("", None, "math: test problems, given as in task.train. Their questions are left out of training. "
                "Empty: evaluate on the problems set aside by task.validation."),
    "validation": Key(200, COUNT_OR_NONE, "math: at least this many training problems are set aside; a question is set "
                      "aside whole. Examples set aside from task.stage_one give the held-out loss and the fixed pool."),
    "stage_one": Key("", None, "math: what stage 1 imitates: gsm8k (worked answers of task.train); a file whose rows "
                     "have question, tagged solution and, for the verifier's stage 1, verification; or a workdir of "
                     "stage 0, for its train.parquet. If a validation.parquet is in the same folder, the held-out loss "
                     "is measured on it, not on rows set aside by task.validation. self: the model's own samples that "
                     "turn out right (loop/self_stage_one.py). Empty: nothing, and sft.steps must be 0."),
    "examples": Key("", None, "With task.stage_one=self: a file of worked examples that the first prompts show, with "
                    "rows as of a file for task.stage_one. Empty: some of school mathematics "
                    "(tasks/worked_examples.py)."),
    "sft_words": Key((2, 8), COUNT, "last_letter: fewest and most words of stage 1's problems."),
    "sft_letters": Key((3, 8), COUNT, "last_letter: fewest and most letters of their words."),
    "rl_words": Key((2, 6), COUNT, "last_letter: words of the generator's problems."),
    "rl_letters": Key((3, 10), COUNT, "last_letter: letters of their words."),
    "verifier_words": Key((), COUNT, "last_letter: words of the verifier's training problems, in its warm-up too; "
                          "empty: as task.rl_words. The generator should solve some of these problems: if nearly all "
                          "answers are wrong, the verifier learns little."),
    "test_words": Key((2, 8), COUNT, "last_letter: words of the test problems; empty: as task.rl_words."),
    "test_letters": Key((3, 10), COUNT, "last_letter: letters of their words."),
    "sft_swaps": Key((2, 8), COUNT, "state_tracking: fewest and most swaps of stage 1's problems."),
    "rl_swaps": Key((2, 8), COUNT, "state_tracking: swaps of the generator's problems."),
    "verifier_swaps": Key((), COUNT, "state_tracking: as task.verifier_words."),
    "test_swaps": Key((2, 8), COUNT, "state_tracking: swaps of the test problems; empty: as task.rl_swaps."),
    "hard_error": Key(0.6, SHARE, "Synthetic: the teacher's error rate on words that end in a hard letter, and on hard "
                      "swaps."),
    "reading_error": Key(0.55, SHARE, "Synthetic: how often the verifier's teacher misreads a hard letter or swap."),
    "claim_noise": Key(0.15, SHARE, "Synthetic: how often steps in the verifier's stage 1 name a random letter or "
                       "state."),
    "double_steps": Key(0.0, SHARE, "Synthetic: how often a step of the teachers names two words or makes two swaps, "
                        "so that solutions of one problem differ in their number of steps. The generator's teacher "
                        "errs twice as often in these. 0: never."),
}

RL: Group = {
    "generator_steps": Key(300, COUNT, "Turns of the generator."),
    "warmup_steps": Key(40, COUNT_OR_NONE, "Turns of the verifier before the generator's first turn."),
    "warmup_until": Key(0.0, SHARE, "End the warm-up before rl.warmup_steps turns, once trust in the verifier, "
                        "measured on these turns, reaches this value (method/trust.py). 0: make all turns, as "
                        "published."),
    "generator_turns_per_cycle": Key(3, COUNT, "N_g, turns of the generator in a cycle."),
    "verifier_turns_per_cycle": Key(1, COUNT, "N_v, turns of the verifier in a cycle."),
    "prompts_per_step": Key(256, COUNT, "P, prompts of a turn."),
    "samples_per_prompt": Key(5, COUNT, "M, responses to each prompt."),
    "verifications_per_solution": Key(1, COUNT, "n_inference, verifications of a solution in the generator's turns."),
    "alpha_initial": Key(0.1, SHARE, "Weight of step advantages at the start."),
    "alpha_final": Key(1e-3, SHARE, "Weight of step advantages at the end."),
    "alpha_schedule": Key("exponential", OneOf(("exponential", "linear", "cosine", "none", "signal")), "How the weight "
                          "of step advantages changes. none: it stays alpha_initial. signal: alpha_final + "
                          "(alpha_initial - alpha_final) x the share of groups whose answers are all right or all "
                          "wrong. Only the grade counts for this share. With reinforce_pp, which compares all samples "
                          "of a batch, the share is 1 if all answers of the batch are alike, otherwise 0."),
    "judge": Key("all", OneOf(("all", "silent", "failed")), "Groups that the verifier judges and that get step "
                 "rewards: all (as published); silent: groups whose outcomes give no advantage; failed: groups without "
                 "a right solution. With rl.trust some others are judged to measure it (method/trust.py)."),
    "trust": Key((), SHARE, "Weigh step rewards by the verifier's F1 score at accepting solutions. Two F1 scores, "
                 "such as (0.4,0.55): up to the first, step rewards have no weight; from the second on, full weight. "
                 "Empty: always full weight, as published (method/trust.py). Arms without such rewards ignore it."),
    "step_reward": Key("mark", OneOf(("mark", "probability")), "What a judged step is rewarded by: mark: +1 for "
                       "CORRECT, -1 for INCORRECT (as published); probability: 2 P(CORRECT) - 1, by the verifier's own "
                       "log-prob of the mark that it wrote, at verifier.temperature (text/marks.py). Step labels of a "
                       "task stay +1 and -1."),
    "practice": Key("all", OneOf(("all", "half_right")), "Problems of the verifier's turns: all (as published); "
                    "half_right: draw four times as many and keep the problems that the generator should solve half "
                    "the time, by its results so far on problems of the same size, in arm=no_labels by its labels "
                    "(method/practice.py)."),
    "dynamic_sampling": Key(0, COUNT_OR_NONE, "Replace groups without signal (all samples have the same reward) by "
                            "groups of further problems, from at most this many further batches (DAPO, arXiv "
                            "2503.14476). The next turn begins after all these batches, used or not, so that arms get "
                            "the same problems. 0: off."),
    "outcome_weight": Key(1.0, WEIGHT, "Weight of the grade in the generator's reward."),
    "format_weight": Key(0.0, WEIGHT, "Weight of the generator's format score in its reward. The score is always "
                         "logged."),
    "gamma": Key(0.8, WEIGHT, "Weight of the verifier's format score in its reward."),
}

GENERATE: Group = {
    "samples": Key(1, Range(1, MAX_SAMPLES), "Stage 0: solutions of each problem.", Change.ROUNDING),
    "temperature": Key(0.1, TEMPERATURE, "Stage 0: sampling temperature.", Change.ROUNDING),
    "problems": Key(0, COUNT_OR_NONE, "Stage 0: problems to solve, drawn at random with seed; 0: all.",
                    Change.ROUNDING),
}

# With task.stage_one=self.
SELF: Group = {
    "problems": Key(256, COUNT, "task.stage_one=self: training problems that a round samples responses to."),
    "samples": Key(4, Range(1, MAX_SAMPLES), "task.stage_one=self: responses to each."),
    "keep": Key(2, COUNT, "task.stage_one=self: most responses to a problem, or to a solution, that are imitated."),
    "rounds": Key(3, COUNT, "task.stage_one=self: most rounds of sampling and imitating."),
}

# Runs of an experiment (`python -m tango_jax.ablate`). A run depends on none of these keys.
ABLATION: Group = {
    "arms": Key(("tango", "grpo", "fixed_verifier", "fixed_verifier_warm", "fixed_generator", "gold_steps"), None,
                "Arms to run.", Change.EXPERIMENT),
    "seeds": Key((0, 1, 2), SEED, "Seeds to run.", Change.EXPERIMENT),
    "grid": Key({}, None, "Settings to try in all combinations; each combination is a cell. An axis is a "
                'config key with its values, {"task.rl_words": [(4, 4), (8, 8)]}, or a name with labelled settings, '
                '{"words": {"4": {"task.rl_words": (4, 4), "task.test_words": (4, 4)}, "8": ...}}, which may include '
                "ablation.arms and ablation.seeds. Empty: one cell. See ablation/grid.py.", Change.EXPERIMENT),
    "workers": Key(1, COUNT, "Runs at a time. Above 1, each is a separate process with its share of the CPU cores.",
                   Change.EXPERIMENT),
}

GROUPS: Group = {
    "seed": Key(0, SEED, "Seed of everything random in a run."),
    "arm": Key("tango", None, "What is trained and rewarded: an arm that --help lists (method/arms.py), or your own, "
               "FILE.py:name."),
    "fork_of": Key("", None, "Workdir of a run: begin with its newest policies, their moments and, with its task, "
                   "its place in the problems. --from=RUN of tango_jax.train sets it. Empty: off.", Change.PLACE),
    "notes": Key("", None, "Lines to log at the start. Config files explain here how they chose "
                 "values.", Change.WATCHING),
    "task": TASK,
    "generator": ROLE,
    "verifier": ROLE,
    "rl": RL,
    "generate": GENERATE,
    "self": SELF,
    "eval": {
        "every": Key(10, COUNT, "Generator steps between evaluations.", Change.ROUNDING),
        "problems": Key(200, COUNT, "Held-out problems for the generator's own prompt, decoded greedily."),
        "pool": Key(200, COUNT, "Fixed solutions for the verifier's own prompt, judged greedily; at most one of each "
                    "example that task.stage_one=gsm8k holds out."),
    },
    "checkpoint": {
        "every": Key(10, COUNT, "Turns between checkpoints.", Change.ROUNDING),
        "keep": Key(2, COUNT, "Checkpoints to keep.", Change.ROUNDING),
        "keep_best": Key("", None, "Metric of evaluations, such as generator/accuracy: the checkpoint with its highest "
                         "value is kept besides, for tango_jax.export --best. Empty: off.", Change.ROUNDING),
        "patience": Key(0, COUNT_OR_NONE, "Evaluations without a better value of keep_best, each after turns that "
                        "train the role it measures, that end the training, as its last turn would; 0: off. If set, "
                        "keep_best and eval.every change results: runs that differ in them are told apart."),
    },
    "rollouts": {
        "every": Key(5, COUNT_OR_NONE, "Turns of a role between dumps of its rollouts; 0: no dumps.", Change.WATCHING),
    },
    "loggers": {
        "tensorboard": Key(False, None, "Write event files to WORKDIR/tensorboard.", Change.WATCHING),
        "wandb": Key("", None, "Weights & Biases project; empty: off. WANDB_* variables configure the rest.",
                     Change.WATCHING),
    },
    "compile_cache": Key("~/.cache/tango_jax/xla", None, "Persistent compilation cache, shared by all runs; empty: "
                         "off.", Change.HARDWARE),
    "compare_with": Key("", None, "An ablation.csv, as tango_jax.ablate writes it. When the run ends, it is compared "
                        "with runs of other arms in this table that have the same task, task.data_seed and seed and "
                        "were made without a grid. Empty: no comparison.", Change.WATCHING),
    "ablation": ABLATION,
}
KEYS: dict[str, Key] = flat_keys(GROUPS)


class ConfigDict(ml_collections.ConfigDict):
    """A group of keys. Assigning a function to a key raises one line that says what the key takes."""

    def __setitem__(self, key: str, value: Any) -> None:
        if callable(value) and not isinstance(value, ml_collections.FieldReference):
            name = getattr(value, "__name__", type(value).__name__)
            raise ValueError(f"{key}={name}: {NAMES_A_FUNCTION}, not the function itself")
        super().__setitem__(key, value)


def config_of(group: Group) -> ConfigDict:
    """Unlocked defaults of a group."""
    # A key with a mapping as its value, such as ablation.grid, is no group.
    has_mapping = any(isinstance(value, Key) and isinstance(value.default, dict) for value in group.values())
    config = ConfigDict(convert_dict=not has_mapping)
    for name, value in group.items():
        config[name] = value.default if isinstance(value, Key) else config_of(value)
    return config


def default_config() -> ConfigDict:
    """Every key at its default, locked."""
    return config_of(GROUPS).lock()


def role_config() -> ConfigDict:
    return config_of(ROLE)
