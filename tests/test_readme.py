"""What the pages show works as it stands there: their Python runs, commands are understood, links resolve."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.own_problems import write_problems
from support.paths import CONFIGS, ROOT
from support.processes import Finished, finish
from support.tiny_checkpoints import MODEL, write_tiny_folder
from support.xla_settings import on_devices
from tango_jax import ablate, bench, evaluate, export, generate, grade, judge, plan, report, sample, sft, train
from tango_jax.cli.arguments import Parser
from tango_jax.cli.command_line import load_config
from tango_jax.cli.config_file import open_config
from tango_jax.cli.validation import validate
from tango_jax.method import tango
from tango_jax.method.load import load_method
from tango_jax.records import Rollout, Solution, StepRewards
from tango_jax.rl import step_count_bias
from tango_jax.runtime.user_code import load_function
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.metrics import read_metrics

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "configs/README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", README + SETTINGS, re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(page for folder in ("configs", "launch", "notebooks", "tango_jax")
                                       for page in (ROOT / folder).rglob("*.md")))
)
COMMANDS = {module.__name__.removeprefix("tango_jax."): module.main for module in (
    train, sft, generate, sample, export, evaluate, judge, grade, report, plan, bench, ablate)}


def block(beginning: str) -> str:
    """The one Python block of the two pages that has this text in its first line."""
    [text] = [text for text in PYTHON if beginning in text.splitlines()[0]]
    return text


def run_python(arguments: list[str], folder: Path) -> Finished:
    """Run Python in a folder, where only this checkout can be imported besides what is installed."""
    environment = on_devices(1) | {"PYTHONPATH": str(ROOT), "HOME": str(folder / "home")}
    return finish(subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE))


# ------------------------------------------------------------------------------------------------------- the Python


@pytest.fixture
def sums(tmp_path, monkeypatch) -> Path:
    """An otherwise empty folder with the page's config file, as the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(block("load_shipped"))
    return tmp_path / "sums.py"


@pytest.mark.long
def test_the_readmes_own_task_reward_and_prompt(sums):
    role = ("row_buckets=(4,)", "cache_buckets=()", "model.num_layers=1")
    settings = [f"{name}.{setting}" for name in ("generator", "verifier") for setting in role] + [
        "rl.generator_steps=1", "rl.warmup_steps=0", "rl.prompts_per_step=2", "eval.problems=2", "rollouts.every=1",
        "compile_cache=",
    ]
    done = run_python(["-m", "tango_jax.train", "--config=sums.py", "--workdir=run",
                       *(f"--config.{setting}" for setting in settings)], sums.parent)
    assert done.code == 0, done.stderr
    assert "a generator prompt: '0+0=" in done.stdout
    assert "sums.py:reward is added to the generator's reward" in done.stdout
    assert "the verifier has no turn after its warm-up: the first would come after generator step 3" in done.stdout
    [row] = [row for row in read_metrics("run") if row["phase"] == "generator"]
    [dumped] = [path for path in Path("run/rollouts").iterdir() if "generator" in path.name]
    rollouts = [json.loads(line) for line in dumped.read_text().splitlines()]
    assert {rollout["problem"]["id"] for rollout in rollouts} == {"sum/0", "sum/1"}
    own = [-0.001 * len(rollout["solution"]["text"]) for rollout in rollouts]
    terms = [{term["name"]: term["value"] for term in rollout["reward"]["terms"]} for rollout in rollouts]
    assert [named["own reward (sums.py:reward)"] for named in terms] == pytest.approx(own)
    totals = [reward + named["grade"] for reward, named in zip(own, terms, strict=True)]
    assert [rollout["reward"]["total"] for rollout in rollouts] == pytest.approx(totals)
    assert row["generator/reward/own/reward"] == pytest.approx(sum(own) / len(own)) and len(own) == 4


REWARD, TASK = r"generator\.rewards=sums\.py:reward: sums\.py", r"task\.name=sums\.py:make_task: sums\.py"
TRIED = f"arm=tango, the generator's turn: {REWARD}"
# What is changed in the page's file, and how the line begins that the command then ends with.
MISTAKES = {
    "no reward function": ("def reward(", "def rewards(", f"{REWARD} has no function 'reward'"),
    "no task function": ("def make_task(", "def make_tasks(", f"{TASK} has no function 'make_task'"),
    "two parameters": ("def reward(solution)", "def reward(answers, rl)",
                       rf"{REWARD}, line 8: missing a required argument: 'rl'; it is called as reward\(solution\)"),
    "a reward that fails": ("-0.001 * len(solution.text)", "1 / len(solution.text)",
                            rf"{TRIED}, line 9: ZeroDivisionError: division by zero \(for the response '' to problem "
                            r"'sum/1'\); the responses were made up to try the method before the run$"),
    "a list": ("return -0.001 *", "return [-0.001] *",
               rf"{TRIED}, line 8: it returned \[-0\.001, .*\.\.\.; it must return one number between"),
    "not a number": ("-0.001 *", "float('nan') *", f"{TRIED}, line 8: it returned nan; it must return one number"),
    "a task that fails": ("index % 89}+", "index % 0}+",
                          rf"{TASK}, line 6: ZeroDivisionError: .* \(in train_problem\(0\)\)"),
    "an answer that is no text": ("answer=str(", "answer=int(",
                                  rf"{TASK}, line 5: train_problem\(0\) returned .*; answer must be text"),
    "no template": ('"{problem}=\\n"', '"{question}="', r"generator\.template='\{question\}=' is neither one of"),
    "a syntax error": ("return config", "return config)", r"sums\.py, line 15: SyntaxError: unmatched '\)'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_ones_own_code_is_one_line_before_any_work(sums, what):
    old, new, message = MISTAKES[what]
    text = sums.read_text()
    assert text.count(old) == 1
    sums.write_text(text.replace(old, new))
    with pytest.raises(SystemExit) as stopped:
        train.main(["--config=sums.py", "--workdir=run", "--config.compile_cache="])
    assert stopped.value.code == 2
    assert re.match(f"error: {message}", str(stopped.value)) and "\n" not in str(stopped.value)
    assert [path.name for path in sums.parent.iterdir()] == ["sums.py"]


@pytest.mark.long
def test_the_readmes_python_program(tmp_path):
    text = block("read_metrics")
    assert len(text.splitlines()) <= 8
    (tmp_path / "program.py").write_text(text)
    done = run_python(["program.py"], tmp_path)
    assert done.code == 0, done.stderr
    rows = read_metrics(tmp_path / "runs/from_python")
    accuracy = json.loads((tmp_path / "runs/from_python/summary.json").read_text())["generator"]["accuracy_final"]
    assert done.stdout.splitlines()[-1] == f"{accuracy} {rows[-1]}"
    turns = [row["phase"] for row in rows if row["phase"] != "eval"]
    assert turns == ["warmup", "generator", "generator"]


def statements(source: str, name: str) -> list[str]:
    """Those of a function, without its docstring, however they are laid out."""
    [function] = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == name]
    return [ast.unparse(one) for one in function.body if not isinstance(one, ast.Expr)]


def test_the_readmes_own_arm(tmp_path, monkeypatch):
    """Its arm loads by name; its turn is tried, and is tango.solve but for one statement; by hand it gives the lowest
    step reward ahead."""
    monkeypatch.chdir(tmp_path)
    Path("my_method.py").write_text(block("import dataclasses"))
    assert "--config.arm=my_method.py:min_form" in README and "'my_method.py:min_form'" in README
    config = load_config("tiny", {"arm": "my_method.py:min_form"})
    validate(config)
    method = load_method(config, make_task(config, {}))
    assert method.arm.label == "min form" and method.stage_one_kind() == ""
    own, published = statements(block("import dataclasses"), "solve"), statements(inspect.getsource(tango), "solve")
    assert [a == b for a, b in zip(own, published, strict=True)].count(False) == 1
    config.generator.max_response = 4
    step_fn = load_function("step", "my_method.py:lowest_ahead_BT", ("t", "steps", "solutions")).function
    reward_BT = np.float32([[0, 0.5, 0, -0.5], [0, 0.5, 0, 0.5]])
    rollout = Rollout((np.zeros(4, int), np.zeros(3, int)), (), np.zeros(2, bool), 0, 0)
    found_BT = step_fn(SimpleNamespace(config=config), StepRewards(reward_BT, reward_BT != 0, []),
                       SimpleNamespace(group_size=2, rollout=rollout))
    # Elements 0.5, -0.5, 0.5, 0.5: mean 0.25, deviation 0.5.
    np.testing.assert_allclose(found_BT, [[-1.5] * 4, [0.5, 0.5, 0.5, 0]], atol=1e-5)


def test_a_solution_has_what_the_page_names():
    assert {"text", "is_correct", "format_score", "steps", "problem"} <= set(Solution.__dataclass_fields__)


# ------------------------------------------------------------------------------------------------------ the commands


def commands_of(text: str) -> list[str]:
    """Every command line with `python -m tango_jax.` in a page's blocks and its running text."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [line[line.index("python -m tango_jax.") :] for line in lines if "python -m tango_jax." in line]


BIAS = "python -m tango_jax.rl.step_count_bias"  # prints tables, and takes no arguments
SHOWN = [(page, line) for page in PAGES for line in commands_of((ROOT / page).read_text(encoding="utf-8"))
         if line != BIAS]


class Parsed(BaseException):
    """Raised in place of a command's work, with what its parser returned."""


@pytest.fixture
def only_parse(monkeypatch, sums) -> None:
    """Commands end once their arguments are read; configs/ is in the current folder, as in the checkout."""
    Path("configs").symlink_to(CONFIGS)

    def stopping(method):
        def parse(self, *args, **kwargs):
            raise Parsed(method(self, *args, **kwargs))

        return parse

    for name in ("parse_args", "parse_overrides"):
        monkeypatch.setattr(Parser, name, stopping(getattr(Parser, name)))


def understood(line: str) -> tuple[dict, list[str]]:
    """What a command reads in a line: {option: value}, and the `key=value` of the configuration.

    Raises SystemExit, ValueError or AssertionError unless the command knows all that the line has.
    """
    module, *arguments = shlex.split(line, comments=True)[2:]
    main = COMMANDS[module.removeprefix("tango_jax.")]
    if any(word.startswith("--keys=") for word in arguments):  # prints, and reads no more
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code
        return {word[2:].partition("=")[0]: [word.partition("=")[2]] for word in arguments}, []
    if "..." in arguments:
        arguments.remove("...")
    with pytest.raises(Parsed) as parsed:
        assert main(arguments) is None, "an exit code: the parser refused"
    found = parsed.value.args[0]
    options, overrides = found if isinstance(found, tuple) else (found, [])
    if getattr(options, "config", None):
        opened = open_config(options.config.partition(":")[0])
        assert set(options.config_arguments) <= set(opened.arguments), "unknown arguments"
        if not opened.arguments:
            load_config(options.config, overrides)
    else:
        assert not getattr(options, "config_arguments", {}), "unknown arguments"
    return vars(options) | getattr(options, "config_arguments", {}), overrides


@pytest.mark.long
def test_ones_own_problems_train_with_the_readmes_command(tmp_path):
    """Word for word: plain rows and a tiny checkpoint in an otherwise empty folder. Of its random weights stage 1 has
    nothing to learn, which one line says; without it the run is whole."""
    [shown] = [line for page, line in SHOWN if page == "README.md" and "--config=own_problems" in line]
    assert shlex.split(shown) == ["python", "-m", "tango_jax.train", "--config=own_problems", "--model=MODEL",
                                  "--problems=problems.jsonl", "--workdir=runs/mine"]
    row = json.loads(re.search(r"rows such as `(\{.*?\})`", README)[1])
    assert set(row) == {"question", "answer"}
    write_problems(tmp_path / "problems.jsonl", 5)
    write_tiny_folder(tmp_path / "MODEL", dataclasses.replace(MODEL, num_layers=1))
    done = run_python(shlex.split(shown)[1:], tmp_path)
    assert done.code == 2 and done.stderr.splitlines()[-1].startswith("error: task.stage_one=self: the generator's"), (
        done.stderr)
    assert "0 % of 4 samples with the plain prompt are well formed" in done.stdout
    command = [*shlex.split(shown)[1:-1], "--config.task.stage_one=", "--workdir=runs/none"]
    done = run_python(command, tmp_path)
    assert done.code == 0, done.stderr
    assert "problems: 4 for training and 1 held out, of 5 in problems.jsonl, read as math: " in done.stdout
    assert "a generator prompt: '<|endoftext|><|im_start|>user\\nSolve the problem below." in done.stdout
    summary = json.loads((tmp_path / "runs/none/summary.json").read_text())
    assert summary["generator"]["accuracy_final"] == 0.0  # its weights are random
    settings = json.loads((tmp_path / "runs/none/config.json").read_text())
    assert settings["notes"].startswith("problems: 4 for training") and settings["generator.use_chat"] is True
    again = run_python(command, tmp_path)
    assert again.code == 0 and "runs/none holds a finished run" in again.stdout, again.stderr


def test_the_tables_of_the_step_count_are_those_that_are_shown(capsys):
    page = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert BIAS in page
    step_count_bias.main()
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^\| (four of .*?) \| ([-+][\d.]+) and ([-+][\d.]+) \| 0 and 0 \|$", page, re.MULTILINE)
    assert len(shown) == 3
    for case, few, many in shown:
        (line,) = [line for line in printed if line.startswith(f"{case.replace(' steps', '')} ")]
        assert line.removeprefix(case.replace(" steps", "")).split()[:4] == [few, many, "+0.00", "+0.00"]


def test_commands_are_found():
    assert len(SHOWN) > 15
    found = {re.match(r"python -m tango_jax\.(\w+)", line)[1] for _, line in SHOWN}
    assert found == set(COMMANDS)
    assert ("configs/README.md", "python -m tango_jax.train --config=sums.py") in SHOWN
    assert commands_of("```bash\npython -m tango_jax.sft \\\n  --a=b\n```\n") == ["python -m tango_jax.sft    --a=b"]


@pytest.mark.parametrize("page, line", SHOWN)
def test_a_command_that_is_shown_is_understood(only_parse, page, line):
    options, overrides = understood(line)
    given = [word.removeprefix("--").partition("=") for word in shlex.split(line, comments=True) if "=" in word]
    assert overrides == [f"{name.removeprefix('config.')}={value}" for name, _, value in given if "config." in name]
    for name, _, value in given:
        if "config." not in name:
            found = options[name.replace("-", "_")]
            assert found == [value] or str(found).lower() == value.lower()


@pytest.mark.parametrize("line", [
    "python -m tango_jax.train --config=tinny", "python -m tango_jax.train --config=tiny --config.rl.gama=1",
    "python -m tango_jax.export --workdir=runs/mine --roles=generator --out=exported",
    "python -m tango_jax.plan --config=tiny --targets=a100-80gb:32", "python -m tango_jax.bench --onl=R1",
])
def test_a_command_that_is_wrong_would_be_found(only_parse, line):
    with pytest.raises((SystemExit, ValueError, AssertionError)):
        understood(line)


# --------------------------------------------------------------------------------------------------------- the files


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: of several equal ones, all but the first get a number."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL),
                              re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        anchors.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return anchors


def broken_links(page: Path) -> list[str]:
    """Links of a page to files that do not exist, or to headings that their page does not have."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text(encoding="utf-8"))):
            found.append(target)
    return found


def test_links_between_pages_resolve(tmp_path):
    (tmp_path / "a.md").write_text("# One `of` two\n## Same\n## Same\n[x](a.md#one-of-two) [x](#same-1) [x](https://x.y)\n"
                                   "[x](b.md) ![x](#same-2)\n")
    assert broken_links(tmp_path / "a.md") == ["b.md", "#same-2"]
    assert {page: found for page in PAGES if (found := broken_links(ROOT / page))} == {}


@pytest.mark.parametrize("page", ["README.md", "configs/arms.md", "tango_jax/README.md"])
def test_the_files_that_a_page_names_exist(page):
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "tango_jax", ROOT / "tango_jax/method")
    assert named and [name for name in named if not any((folder / name).is_file() for folder in folders)] == []
