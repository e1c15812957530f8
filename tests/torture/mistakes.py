"""A hundred mistakes of a user, over all commands: each must end at once, in one clear line, and leave nothing behind.

In: how many, and a seed that chooses among them. Out: how many were tried and survived, and what is wrong with the
others. The commands run in this process, as their `main` is called from a shell.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from tango_jax.config import default_config, flatten  # noqa: E402
from tango_jax.metrics import CompileCounter  # noqa: E402
from tango_jax.ranges import numbers_of  # noqa: E402

ROWS = ROOT / "tests/fixtures/rows"
# What an error line tells to do begins with one of these, or is a limit that says it already.
HINTS = ("must", "choose", "give", "name", "raise", "lower", "use ", "write", "set ", "take", "try", "did you mean",
         "is not one of", "start", "leave", "create", "ask", "see ", "--help", "invalid", "expected", "required",
         "restore", "line ", "add ", "is neither", "no rows", "filter", "fetch", "let ")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One command line. {work} is a folder that does not exist yet, {files} one with files, {model} a checkpoint."""

    command: str
    arguments: tuple[str, ...]
    names: str  # what the error line must hold: the setting or the value that is wrong
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        words = [*(f"{name}={value}" for name, value in self.environment), self.command, *self.arguments]
        return " ".join(word if len(word) <= 80 else f"{word[:77]}..." for word in words)


TINY = (f"--config={ROOT}/configs/tiny.py", "--config.compile_cache=", "--workdir={work}")
MATH = ("--config={files}/math.py", "--workdir={work}")
TEACHER = ("--config={files}/teacher.py", "--workdir={work}")
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
    ("ablate", "--config.ablation.seeds=(0,-1)", "ablation.seeds=(0, -1)"),
    ("ablate", "--config.ablation.seeds=()", "ablation.seeds is empty"),
    ("ablate", "--config.ablation.seeds=(1,1)", "ablation.seeds=(1, 1)"),
    ("ablate", "--config.ablation.arms=()", "ablation.arms is empty"),
    ("ablate", "--config.ablation.arms=('tango','tangos')", "tangos"),
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
    ("generate", "--workdir={files}/math.py/run", "math.py is no folder"),
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
    ("grade", "--file={files}", "is no file"),
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


def mistakes(count: int = 100, seed: int = 0) -> tuple[int, int, list[str]]:
    """Make `count` mistakes, drawn by `seed`; (tried, survived, what is wrong with each of the others)."""
    drawn = list(_drawn(count, random.Random(seed)))
    with tempfile.TemporaryDirectory() as folder:
        files = _write_files(Path(folder) / "files")
        model = Path(folder) / "model"
        if any("{model}" in argument for mistake in drawn for argument in mistake.arguments):
            from tiny_checkpoints import write_tiny_folder

            write_tiny_folder(model)
        failures = []
        for number, mistake in enumerate(drawn):
            place = Path(folder) / f"place_{number}"
            place.mkdir()
            failures += [f"{mistake}: {fault}" for fault in _faults(mistake, place, files, model)[:1]]
    return len(drawn), len(drawn) - len(failures), failures


def _drawn(count: int, rng: random.Random) -> Iterator[Mistake]:
    """Those written above, in random order; where there are not enough, numbers of the config that are out of range."""
    written = []
    for command, *added, names in WRITTEN:
        base = added.pop(0) if added and isinstance(added[0], tuple) else BASES[command]
        written.append(Mistake(command, (*base, *added), names))
    written += [Mistake(command, BASES[command], names, env) for command, env, names in IN_THE_ENVIRONMENT]
    rng.shuffle(written)
    yield from written[:count]
    settings = flatten(default_config())
    keys = [key for key, value in settings.items() if numbers_of(value)]
    for key in rng.choices(keys, k=max(0, count - len(written))):
        value = rng.choice(("-7.0", "1e999") if isinstance(settings[key], float) else ("-7", str(2**40)))
        text = f"({value},)" if isinstance(settings[key], tuple) else value
        command = rng.choice(("train", "sft", "ablate", "plan"))
        yield Mistake(command, (*BASES[command], f"--config.{key}={text}"), f"{key}=")


def _faults(mistake: Mistake, place: Path, files: Path, model: Path) -> list[str]:
    """What is wrong with the end of a command, most telling first; nothing if it is as it should be."""
    names = {"work": str(place / "work"), "files": str(files), "model": str(model)}
    arguments = [_filled(argument, names) for argument in mistake.arguments]
    before = _listed(place, files)
    with CompileCounter() as compiles:
        code, out, err = _run(mistake.command, arguments, dict(mistake.environment), place)
    errors = [line for line in err.splitlines() if "error: " in line]
    others = [line for line in err.splitlines() if line not in errors and not line.startswith(("usage: ", " "))]
    faults = []
    if "Traceback" in err + out:
        faults.append(f"a traceback that ends in {err.strip().splitlines()[-1]!r}")
    if code in (0, None):
        faults.append("it ended with code 0")
    if len(errors) != 1 or others:
        faults.append(f"{len(errors)} error lines and {len(others)} others: {err[-300:]!r}")
    elif mistake.names not in errors[0]:
        faults.append(f"{mistake.names!r} is not in {errors[0]!r}")
    elif not any(hint in errors[0] for hint in HINTS):
        faults.append(f"it does not say what to do: {errors[0]!r}")
    if changed := sorted(set(_listed(place, files)) ^ set(before)):
        faults.append(f"it left {changed}")
    if compiles.total:
        faults.append(f"it came after {compiles.total} compilations")
    return faults


def _filled(text: str, names: dict[str, str]) -> str:
    """The text with its {names} replaced; other braces stay."""
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _listed(*folders: Path) -> list[str]:
    return [str(path) for folder in folders for path in sorted(folder.rglob("*"))]


def _run(command: str, arguments: list[str], environment: dict, place: Path) -> tuple[int | None, str, str]:
    """(exit code, standard output, standard error) of a command's `main`, started in an empty folder."""
    main = importlib.import_module(f"tango_jax.{command}").main
    handler, out, err = signal.getsignal(signal.SIGTERM), io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(place), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment), mock.patch("sys.stdin", io.StringIO()),
    ):  # fmt: skip
        try:
            code = main(arguments)
        except SystemExit as stopped:  # a text is printed and the code is 1, as Python does at its end
            code = stopped.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            signal.signal(signal.SIGTERM, handler)
    return code, out.getvalue(), err.getvalue()


def _write_files(folder: Path) -> Path:
    """Config and data files with a mistake each, and two configs that have none."""
    folder.mkdir()
    head = "from tango_jax.config import default_config\n"
    body = "def get_config(argument):\n    config = default_config()\n    {}\n    return config\n"
    math = "\n    ".join((
        "config.task.name, config.task.validation = 'math', 2",
        f"config.task.train = config.task.test = {str(ROWS / 'gsm8k.jsonl')!r}",
        "config.rl.prompts_per_step = 1", "config.compile_cache = ''",
        "config.generator.checkpoint = config.verifier.checkpoint = {!r}",
    ))  # fmt: skip
    texts = {
        "math.py": head + body.format(math.format("a/b")),
        "teacher.py": head + body.format(math.format(str(folder.parent / "model"))),
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
