"""SmolLM2-135M-Instruct with adapters on last letters of more words, where few sampled solutions are right.

Command:   python -m tango_jax.ablate --config=configs/smollm2_words.py:compared --workdir=runs/smollm2_words/compared
           and :shared in a folder beside it. Offline, see smollm2_last_letter.py. Part `development` comes
           first: it chooses the number of words.
Hardware:  a CPU with two cores and 16 GiB of memory.
Time:      stage 1 of the generator takes at most 37 minutes on one core, a run of `grpo` or `gold_steps` 50 minutes on
           a busy machine; the rest is not measured yet.
Expected:  on the development start, `gold_steps` 0.076 ahead of `grpo` with six words (results/smollm2_words.md).
"""

from ml_collections import ConfigDict

from tango_jax.cli.config_file import load_shipped

TRUST = {"rl.trust": (0.4, 0.55), "rl.judge": "failed"}
MOST_WORDS = 6  # of a problem of stage 1
WORDS = (4, 6)  # compared on the development start
DEVELOPMENT_START, START = 100, 0
PARTS = {"development": ("grpo", "gold_steps"), "compared": ("grpo", "gold_steps", "tango"), "shared": ("self_verify",)}


def get_config(argument: str = "") -> ConfigDict:
    """`argument`: a part of the experiment, and perhaps the number of words, as in development:4."""
    part, words = ((argument or "compared").split(":") + [""])[:2]
    if part not in PARTS or words and words not in map(str, WORDS):
        raise ValueError(f"there is no {argument!r}: choose a part, {', '.join(PARTS)}, and perhaps a number of words, "
                         f"{' or '.join(map(str, WORDS))}")
    config = load_shipped("smollm2_lora", "published")
    task, generator, verifier = config.task, config.generator, config.verifier
    task.sft_words, task.rl_words, task.test_words = (2, MOST_WORDS), (MOST_WORDS, MOST_WORDS), ()
    task.data_seed = DEVELOPMENT_START if part == "development" else START
    # Tokens of 6 words of 5 letters: a question has up to 34, its solution 81, the verification 148.
    generator.max_prompt, generator.max_response, generator.cache_buckets = 40, 92, (72,)
    generator.sft.pack_length, verifier.sft.pack_length = 128, 272
    verifier.max_prompt, verifier.max_response = 128, 160
    verifier.prompt_buckets, verifier.cache_buckets = (), (80,)
    # Where no sample of a turn is right, the bonus alone would move the weights.
    generator.loss.entropy_coef = verifier.loss.entropy_coef = 0.0
    if part == "development":
        verifier.sft.steps = 0  # neither arm samples a verifier
    config.ablation.arms, config.ablation.seeds = PARTS[part], (100,) if part == "development" else (0, 1, 2)
    adapters = config.ablation.grid["weights"]
    chosen = [int(words)] if words else list(WORDS if part == "development" else WORDS[-1:])
    config.ablation.grid = {
        "weights": adapters,
        "words": {str(count): {"task.rl_words": (count, count)} for count in chosen},
    }
    if part != "development":
        config.ablation.grid["trust"] = {"on": TRUST}
    return config
