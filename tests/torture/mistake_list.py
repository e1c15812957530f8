"""The mistakes that `mistakes.py` makes: command lines, what their error must name, and the files that they read.

{work} stands for a folder that does not exist yet, {files} for that of `write_files`, {model} for a checkpoint's.
"""

from pathlib import Path

from support.paths import ROOT, ROWS

TINY = (f"--config={ROOT}/configs/tiny.py", "--config.compile_cache=", "--workdir={work}")
MATH = ("--config={files}/math.py", "--workdir={work}")
TEACHER = (*MATH, "--config.generator.checkpoint={model}", "--config.verifier.checkpoint={model}")
BASES = {
    "train": TINY,
    "sft": TINY,
    "ablate": TINY,
    "generate": MATH,
    "plan": (f"--config={ROOT}/configs/tiny.py", "--target=a100-80gb:8"),
    "sample": ("--checkpoint=a/b", "--question=1+1?"),
    "evaluate": ("--checkpoint=a/b", f"--sets=gsm8k:{ROWS}/gsm8k.jsonl", "--out={work}"),
    "report": ("--out={work}/report.html",),
    "grade": ("--out={files}/graded.jsonl",),
    "bench": (),
    "export": ("--out={work}",),
}

# (command, what is added to its base, what the error must name); of an option given twice, the last one counts.
WRITTEN = (
    # ---- numbers of the config
    ("train", "--config.generator.optimizer.lr=1e999", "generator.optimizer.lr=inf"),
    ("sft", "--config.verifier.optimizer.eps=-1", "verifier.optimizer.eps=-1.0"),
    ("train", "--config.generator.temperature=1e999", "generator.temperature=inf"),
    ("train", "--config.verifier.model.rope_base=-1", "verifier.model.rope_base=-1.0"),
    ("sft", "--config.generator.model.norm_eps=-1", "generator.model.norm_eps=-1.0"),
    ("train", "--config.generator.loss.entropy_coef=nan", "generator.loss.entropy_coef=nan"),
    ("sft", "--config.generator.sft.max_heldout_loss=-1", "generator.sft.max_heldout_loss=-1.0"),
    ("train", "--config.seed=-1", "seed=-1"),
    ("train", "--config.seed=4294967296", "seed=4294967296"),
    ("train", "--config.verifier.sft.optimizer.b2=0.99999999999", "float32 rounds it to 1"),
    ("train", "--config.generator.optimizer.schedule=cosine", "generator.optimizer.decay_steps=0"),
    ("train", "--config.generator.mesh.decode_tensor=3", "mesh.decode_tensor=3"),
    ("train", "--config.verifier.mesh.tensor=5", "tensor=5"),
    ("train", "--config.generator.max_prompt=2", "generator.max_prompt=2"),
    ("train", "--config.generator.template=math", "make prompts of"),
    ("train", "--config.generator.row_buckets=(0,8)", "row_buckets=(0, 8)"),
    ("train", "--config.generator.row_buckets=(8,4)", "row_buckets=(8, 4)"),
    ("train", "--config.rl.samples_per_prompt=3", "rl.samples_per_prompt=3"),
    ("train", "--config.rl.alpha_final=0.0", "alpha_final=0.0"),
    ("train", "--config.generator.model.num_kv_heads=3", "num_kv_heads=3"),
    ("train", "--config.verifier.model.head_dim=15", "head_dim=15"),
    ("train", "--config.task.sft_words=(3,2)", "task.sft_words=(3, 2)"),
    ("train", f"--config={ROOT}/configs/state_tracking.py", "--config.task.rl_swaps=(9,8)", "task.rl_swaps=(9, 8)"),
    ("ablate", "--config.ablation.seeds=(0,-1)", "ablation.seeds=(0, -1)"),
    ("ablate", "--config.ablation.seeds=()", "ablation.seeds is empty"),
    ("ablate", "--config.ablation.seeds=(1,1)", "ablation.seeds=(1, 1)"),
    ("ablate", "--config.ablation.arms=()", "ablation.arms is empty"),
    ("ablate", "--config.ablation.arms=('tango','tangos')", "tangos"),
    ("ablate", "--config.ablation.workers=0", "ablation.workers=0"),
    ("ablate", "--config.ablation.grid={'task.rl_wordz':[(1,1)]}", "did you mean task.rl_words?"),
    ("ablate", "--config.ablation.grid={'task.rl_words':[(1,1),(9,9)]}", "cell rl_words=9-9"),
    ("ablate", "--config.ablation.grid={'words':{'a':{'arm':'grpo'}}}", "ablation.grid['words'] sets 'arm'"),
    # ---- names and words
    ("train", "--config.arm=tangos", "tangos"),
    ("train", "--config.task.name=sums", "sums"),
    ("sft", "--config.generator.model.remat=some", "remat='some'"),
    ("train", "--config.generator.template=nothing.txt", "nothing.txt"),
    ("train", "--config.generator.checkpoint=nothing.gguf", "nothing.gguf"),
    ("train", "--config.generator.checkpoint=a/b/c", "a/b/c"),
    ("train", "--config.verifier.checkpoint=~nobody_of_that_name/x", "~nobody_of_that_name/x"),
    ("train", "--config.verifier.init_from=~nobody_of_that_name/x", "~nobody_of_that_name/x"),
    ("train", "--config.loggers.wandb=me/tango", "me/tango"),
    # ---- functions of the user's
    ("train", "--config.generator.reward=length", "must be FILE.py:name"),
    ("train", "--config.generator.reward={files}/no.py:length", "there is no file"),
    ("train", "--config.generator.reward=no_module:length", "ModuleNotFoundError"),
    ("sft", "--config.verifier.reward={files}/zero.py:get_config", "zero.py, line 1: too many positional arguments"),
    ("ablate", "--config.generator.reward={files}/zero.py:get_config", "zero.py, line 2: ZeroDivisionError"),
    ("train", "--config.task.name={files}/none.py:tasks", "has no function 'tasks'"),
    ("train", "--config.task.name={files}/none.py:get_config", "none.py, line 2: it must return a tango_jax"),
    # ---- overrides and the command line
    ("train", "--config.seed", "--config.seed has no value"),
    ("train", "--config.seed=", "--config.seed="),
    ("train", "--config.seed=1.5", "--config.seed=1.5"),
    ("train", "--config.rl.gama=1", "did you mean rl.gamma?"),
    ("train", "--config.rl=1", "--config.rl is a group"),
    ("train", "--config.generator.row_buckets={[]:1}", "row_buckets={[]:1}"),
    ("train", "--config.rl.gamma=1" + "0" * 400, "rl.gamma=1000"),
    ("train", "--config.=1", "--config.=1"),
    ("train", "--worksir=x", "--worksir=x"),
    ("sft", "tiny", "tiny"),
    # ---- config files
    ("train", "--config=nothing.py", "nothing.py"),
    ("train", "--config={files}", "is not a Python file"),
    ("train", "--config=" + "x" * 300 + ".py", "File name too long"),
    ("train", "--config={files}/syntax.py", "syntax.py, line 2"),
    ("sft", "--config={files}/name.py", "name.py, line 2: NameError"),
    ("ablate", "--config={files}/import.py", "import.py, line 1: ModuleNotFoundError"),
    ("generate", "--config={files}/zero.py", "zero.py, line 2: ZeroDivisionError"),
    ("plan", "--config={files}/none.py", "get_config returned None"),
    ("train", "--config={files}/exit.py", "exit.py, line 2: SystemExit"),
    ("train", "--config={files}/deleted.py", "the config lacks seed"),
    ("train", "--config={files}/unknown.py", "did you mean seed?"),
    ("train", "--config={files}/type.py", "rl.gamma=None"),
    ("train", "--config={files}/binary.py", "binary.py"),
    # ---- folders to write into
    ("train", "--workdir=", "--workdir is empty"),
    ("sft", "--workdir={files}/math.py", "math.py is a file"),
    ("generate", "--workdir={files}/math.py/run", "math.py is not a folder"),
    ("ablate", "--workdir=~nobody_of_that_name/x", "~nobody_of_that_name/x"),
    ("evaluate", "--out=", "--out is empty"),
    ("evaluate", "--out={files}/math.py", "math.py is a file"),
    # ---- data
    ("train", MATH, "--config.task.train={files}/empty.jsonl", "empty.jsonl: no rows"),
    ("train", MATH, "--config.task.train={files}", "is a folder"),
    ("train", MATH, "--config.task.train={files}/bytes.jsonl", "bytes.jsonl, line 1"),
    ("train", MATH, "--config.task.train={files}/deep.jsonl", "deep.jsonl, line 1"),
    ("sft", MATH, "--config.task.train={files}/nan.jsonl", "nan.jsonl, line 1"),
    ("sft", MATH, "--config.task.train={files}/list.jsonl", "list.jsonl, line 1"),
    ("train", MATH, "--config.task.train={files}/object.jsonl", "object.jsonl, line 1"),
    ("train", MATH, "--config.task.train={files}/null.jsonl", "null.jsonl, line 1"),
    ("train", MATH, "--config.task.train={files}/twice.jsonl", "twice.jsonl, line 1"),
    ("train", MATH, "--config.task.train={files}/half.jsonl", "half.jsonl, line 1"),
    ("generate", "--config.task.train={files}/nothing.jsonl", "nothing.jsonl does not exist"),
    ("generate", "--config.task.train=", "task.train is empty"),
    ("generate", "--config.task.train=hub:a", "hub:a"),
    ("generate", "--config.task.row_format=csv", "csv"),
    ("generate", "--config.generate.samples=0", "generate.samples=0"),
    ("generate", "--config.generate.temperature=-0.1", "generate.temperature=-0.1"),
    ("generate", "--config.generate.keep.best=9", "generate.keep.best=9"),
    ("generate", TINY, "--config.seed=3", "task.name=last_letter"),
    ("generate", TEACHER, "--config.generator.max_prompt=2", "generator.max_prompt=2"),
    # ---- the other commands
    ("evaluate", "--temperature=nan", "--temperature=nan"),
    ("evaluate", "--top_p=1e999", "--top_p=inf"),
    ("evaluate", "--samples=-1", "--samples=-1"),
    ("evaluate", "--problems=x", "--problems: invalid int value: 'x'"),
    ("evaluate", "--seed=-1", "--seed=-1"),
    ("evaluate", "--sets=nothing", "'nothing'"),
    ("evaluate", "--sets=gsm8k:{files}/deep.jsonl", "deep.jsonl, line 1"),
    ("evaluate", "--skip_greedy", "--skip_greedy"),
    ("evaluate", "--checkpoint={model}", "--max_prompt=2", "--max_prompt=2"),
    ("evaluate", "--checkpoint={model}", "--max_prompt=4096", "--max_new=9", "4096 positions"),
    ("evaluate", "--checkpoint={model}", "--decode_tensor=3", "decode_tensor=3"),
    ("sample", "--temperature=1e999", "--temperature=inf"),
    ("sample", "--temperature=warm", "--temperature: invalid float value: 'warm'"),
    ("sample", "--top_p=nan", "--top_p=nan"),
    ("sample", "--max_new=-1", "--max_new=-1"),
    ("sample", "--seed=-1", "--seed=-1"),
    ("sample", "--question=", "--question is empty"),
    ("sample", "--checkpoint=", "checkpoint is empty"),
    ("sample", "--checkpoint=nothing.gguf", "nothing.gguf"),
    ("plan", "--filled=nan", "--filled=nan"),
    ("plan", "--per-process=3", "--per-process=3"),
    ("plan", "--target=b200:8", "b200:8"),
    ("plan", "--target=h100:12", "12 are no multiple"),
    ("plan", "--target=cpu:100000", "cpu:100000"),
    ("plan", "--config.rl.gamma=-1", "rl.gamma=-1.0"),
    ("bench", "--runs=0", "--runs=0"),
    ("bench", "--runs=many", "'many'"),
    ("bench", "--only=R9", "R9"),
    ("report", "no run is named"),
    ("report", "{files}", "holds no run"),
    ("report", "{files}", "--watch=nan", "--watch=nan"),
    ("report", "{files}", "--rollouts=-1", "--rollouts=-1"),
    ("report", "{files}", "--rollouts=x", "'x'"),
    ("report", "{files}", "--out={files}", "is a folder"),
    ("report", "{files}", "--ou=x", "--ou=x"),
    ("grade", "--file={files}/nothing.jsonl", "nothing.jsonl"),
    ("grade", "--file={files}", "is not a file"),
    ("grade", "--file={files}/bytes.jsonl", "bytes.jsonl, line 1"),
    ("grade", "--file={files}/list.jsonl", "list.jsonl, line 1"),
    ("grade", "--file={files}/graded_nan.jsonl", "'gold' is nan"),
    ("grade", "--file={files}/math.py", "--out={files}", "is a folder"),
    ("grade", "--file={files}/math.py", "--out={work}/x.jsonl", "there is no folder"),
    ("export", "--workdir={files}/nothing", "nothing/config.json"),
    ("export", "--workdir=", "--workdir is empty"),
    ("export", "--workdir={files}", "--role=judge", "'judge'"),
    ("export", "--workdir={files}", "--out={files}", "not an empty folder"),
    ("export", "--workdir={files}", "--dtype=int8", "'int8'"),
    ("export", "--workdir={files}", "--rolle=verifier", "--rolle=verifier"),
)
ADDRESS = ("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
IN_THE_ENVIRONMENT = (
    ("train", (ADDRESS, ("JAX_NUM_PROCESSES", "abc"), ("JAX_PROCESS_ID", "0")), "JAX_NUM_PROCESSES='abc'"),
    ("sft", (ADDRESS, ("JAX_NUM_PROCESSES", "2"), ("JAX_PROCESS_ID", "2")), "JAX_PROCESS_ID=2"),
    ("evaluate", (ADDRESS, ("JAX_NUM_PROCESSES", "2"), ("JAX_PROCESS_ID", "-1")), "JAX_PROCESS_ID='-1'"),
    ("ablate", (ADDRESS, ("JAX_NUM_PROCESSES", "2")), "JAX_PROCESS_ID is not"),
    ("bench", (ADDRESS, ("JAX_NUM_PROCESSES", "x"), ("JAX_PROCESS_ID", "0")), "JAX_NUM_PROCESSES='x'"),
    ("train", ((ADDRESS[0], "10.0.0.1"), ("JAX_NUM_PROCESSES", "2"), ("JAX_PROCESS_ID", "0")), "'10.0.0.1'"),
)


def write_files(folder: Path) -> Path:
    """Config and data files with a mistake each, and math.py, a config that has none."""
    folder.mkdir()
    head = "from tango_jax.config import default_config\n"
    body = "def get_config(argument):\n    config = default_config()\n    {}\n    return config\n"
    math = "\n    ".join((
        "config.task.name, config.task.validation = 'math', 2",
        f"config.task.train = config.task.test = {str(ROWS / 'gsm8k.jsonl')!r}",
        "config.rl.prompts_per_step = 1", "config.compile_cache = ''",
        "config.generator.checkpoint = config.verifier.checkpoint = 'a/b'",
    ))  # fmt: skip
    texts = {
        "math.py": head + body.format(math),
        "syntax.py": "def get_config(argument):\n    return (\n",
        "name.py": "def get_config(argument):\n    return default_config()\n",
        "import.py": "import nothing_of_that_name\n",
        "zero.py": "def get_config(argument):\n    return 1 / 0\n",
        "none.py": head + body.format("").replace("return config", "pass"),
        "exit.py": "import sys\nsys.exit(0)\n",
        "deleted.py": head + body.format("config.unlock(); del config.seed"),
        "unknown.py": head + body.format("config.unlock(); config.sed = 1"),
        "type.py": head + body.format("config.rl.gamma = None"),
        "empty.jsonl": "",
        "deep.jsonl": '{"question": ' + "[" * 100_000,
        "nan.jsonl": '{"question": "1+1?", "answer": NaN}',
        "list.jsonl": '{"question": "1+1?", "answer": [2, 3], "text": "a", "gold": [2]}',
        "object.jsonl": '{"question": "1+1?", "answer": {"value": 2}}',
        "null.jsonl": '{"question": "1+1?", "answer": null}',
        "twice.jsonl": '{"question": "1+1?", "answer": 2, "answer": 3}',
        "half.jsonl": '{"question": "\\ud83d", "answer": 2}',
        "graded_nan.jsonl": '{"text": "a", "gold": NaN}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.py").write_bytes(b"\xff\xfe\x00x")
    (folder / "bytes.jsonl").write_bytes(bytes(range(128, 256)) * 9)
    return folder
