"""The files in launch/: shell and YAML by their own tools, XLA's flags by XLA, and the restart policy case by case."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models

from support.launching import run
from support.paths import LAUNCH, ROOT
from tango_jax.cli.command_line import parse_command_line

SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])


def bash(script: str, **changes: str) -> subprocess.CompletedProcess:
    return run(["bash", "-c", script], **changes)


def test_shellcheck_finds_nothing():
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run([tool, "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [path for path in SCRIPTS if os.access(path, os.X_OK) or path.suffix == ".sbatch"],
                         ids=lambda path: path.name)
def test_headers_name_no_missing_file(script):
    """Scripts refer to each other by path; so do their headers."""
    for name in re.findall(r"\blaunch/[\w.]+\.(?:sh|sbatch|yaml)\b", script.read_text()):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\bconfigs/\w+\.py\b", script.read_text()):
        assert (ROOT / name).exists(), name


# XLA's flags. A CPU's jaxlib knows those of GPUs too, and aborts at a flag that it does not know.

COUNT_DEVICES = 'python -c "import jax; print(jax.device_count())"'


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_xla_knows_all_flags(platform):
    done = bash(f"source launch/_env.sh && source launch/flags_{platform}.sh && JAX_PLATFORMS=cpu {COUNT_DEVICES}")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_an_unknown_flag_aborts():
    done = bash(f"source launch/_env.sh && source launch/flags_cpu.sh && {COUNT_DEVICES}", XLA_FLAGS="--xla_misspelt=1")
    assert done.returncode != 0 and "Unknown flag in XLA_FLAGS: --xla_misspelt=1" in done.stderr


def test_flags_of_the_user_win():
    script = f"source launch/_env.sh && source launch/flags_cpu.sh && {COUNT_DEVICES}"
    assert bash(script, LOCAL_DEVICES="4").stdout == "4\n"
    done = bash(script, LOCAL_DEVICES="4", XLA_FLAGS="--xla_force_host_platform_device_count=3")
    assert done.stdout == "3\n", done.stderr


@pytest.mark.compilers
def test_libtpu_knows_the_tpu_flags():
    pytest.importorskip("libtpu")
    load = "from jax.experimental import topologies as t; t.get_topology_desc(platform='tpu', topology_name='v5e:2x2')"
    script = f'source launch/flags_tpu.sh && JAX_PLATFORMS=cpu "{sys.executable}" -c "{load}"'
    alone = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    assert bash(script, **alone).returncode == 0
    assert bash(script, LIBTPU_INIT_ARGS="--xla_tpu_misspelt=1", **alone).returncode != 0


# The environment.


def test_a_ready_environment_is_used_as_it_is(tmp_path):
    done = bash("source launch/_env.sh && command -v python && pwd")
    assert done.stdout == f"{Path(sys.executable).parent}/python\n{ROOT}\n"
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\nexit 1\n")
    lacking.chmod(0o755)
    done = bash("source launch/_env.sh", TANGO_PYTHON=str(lacking))
    assert done.returncode == 1 and f"TANGO_PYTHON={lacking} is not a Python, or lacks jax" in done.stderr


def test_an_unknown_platform_is_named():
    done = bash("source launch/_env.sh", TANGO_PLATFORM="cuda")
    assert done.returncode == 1 and "TANGO_PLATFORM=cuda is none of cpu, gpu, tpu" in done.stderr


# The restart policy.


@pytest.mark.parametrize(
    ("codes", "verdict", "worst"),
    [
        ("0 0", "done", 0),
        ("0 75", "preempted", 75),
        ("75 75", "preempted", 75),
        ("137 76", "restart", 137),
        ("75 134", "restart", 134),
        ("143 0", "restart", 143),
        ("76 1", "stop", 1),
        ("1 137", "stop", 1),
        ("0 2 75", "stop", 2),
        ("139 76", "stop", 139),  # SIGSEGV: a bug
    ],
)
def test_judgement_of_exit_codes(codes, verdict, worst):
    done = bash(f"source launch/_supervise.sh; judge {codes}; worst_of {codes}")
    assert done.stdout.split() == [verdict, str(worst)]


# A process under SLURM: its number, its GPUs, and codes that rank by what they mean (srun reports the largest).


@pytest.mark.parametrize(("gpus_per_task", "local_id", "ids"), [(1, 3, "3"), (4, 0, "0,1,2,3"), (4, 1, "4,5,6,7")])
def test_slurm_task_takes_its_gpus(gpus_per_task, local_id, ids):
    done = run(["bash", LAUNCH / "_slurm_task.sh", "env"], SLURM_PROCID="5", SLURM_LOCALID=str(local_id),
               TANGO_GPUS_PER_TASK=str(gpus_per_task))
    assert {"JAX_PROCESS_ID=5", f"JAX_LOCAL_DEVICE_IDS={ids}"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(("code", "ranked"), [(0, 0), (75, 75), (76, 76), (134, 76), (137, 76), (1, 250), (139, 250)])
def test_slurm_task_ranks_its_exit_code(code, ranked):
    done = run(["bash", LAUNCH / "_slurm_task.sh", "bash", "-c", f"exit {code}"], SLURM_PROCID="0", SLURM_LOCALID="0",
               TANGO_GPUS_PER_TASK="0")
    assert done.returncode == ranked
    assert (f"process 0 ended with exit code {code}" in done.stderr) == (code != 0)


# The JobSet, for TPUs as it stands, for GPUs as its header says.


def jobset(platform: str) -> dict:
    text = (LAUNCH / "gke_jobset.yaml").read_text()
    if platform == "gpu":
        edit = re.search(r"GPU: (sed .*?) launch/gke_jobset.yaml", text)[1]
        text = subprocess.run(edit, shell=True, input=text, capture_output=True, text=True, check=True).stdout
    return yaml.safe_load(text)


def unknown_fields(given, understood, path: str = "") -> list[str]:
    """What of a document is not in its parsed form: the models drop fields that the schema does not have."""
    if isinstance(given, dict):
        understood = understood if isinstance(understood, dict) else {}
        pairs = ((key, value, understood.get(key)) for key, value in given.items())
        return [name for key, a, b in pairs for name in unknown_fields(a, b, f"{path}/{key}")]
    if isinstance(given, list):
        pairs = zip(range(len(given)), given, understood or [None] * len(given), strict=True)
        return [name for i, a, b in pairs for name in unknown_fields(a, b, f"{path}/{i}")]
    return [] if given == understood else [path]


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_jobset_follows_its_schema(platform):
    document = jobset(platform)
    assert unknown_fields(document, models.JobsetV1alpha2JobSet.from_dict(document).to_dict()) == []
    document["spec"]["failurePolicy"]["maxRestart"] = 3
    understood = models.JobsetV1alpha2JobSet.from_dict(document).to_dict()
    assert unknown_fields(document, understood) == ["/spec/failurePolicy/maxRestart"]


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_jobset_restarts_on_the_codes_of_the_policy(platform):
    spec = jobset(platform)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    mistake = job["podFailurePolicy"]["rules"][-1]
    assert (mistake["action"], mistake["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    verdicts = bash("source launch/_supervise.sh; for code in {1..255}; do judge $code; done").stdout.split()
    assert mistake["onExitCodes"]["values"] == [i for i, verdict in enumerate(verdicts, 1) if verdict != "stop"]
    # A job that fails by this rule ends all; any other failure of one pod, all pods being needed, restarts all.
    [rule] = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["parallelism"] == job["completions"] and job["completionMode"] == "Indexed"
    # The program is not process 1, from which the kernel keeps SIGABRT: 134 would show as 139.
    assert job["template"]["spec"]["shareProcessNamespace"] is True


@pytest.mark.parametrize(("platform", "resource"), [("tpu", "google.com/tpu"), ("gpu", "nvidia.com/gpu")])
def test_jobset_asks_for_its_platform(platform, resource):
    document = jobset(platform)
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert list(container["resources"]["limits"]) == [resource]
    assert len(pod["nodeSelector"]) == {"tpu": 2, "gpu": 1}[platform]
    values = {item["name"]: item.get("value") for item in container["env"]}
    assert values["TANGO_PLATFORM"] == platform
    # GKE mounts libcuda where the loader of the image does not look.
    assert values.get("LD_LIBRARY_PATH") == {"tpu": None, "gpu": "/usr/local/nvidia/lib64"}[platform]
    if platform == "gpu":
        first = f"{document['metadata']['name']}-{document['spec']['replicatedJobs'][0]['name']}-0-0"
        assert values["JAX_COORDINATOR_ADDRESS"].startswith(f"{first}.{document['metadata']['name']}:")
        assert values["JAX_NUM_PROCESSES"] == str(job["completions"]) and "JAX_PROCESS_ID" in values
    # The program knows the options.
    config, workdir = parse_command_line("train", "", re.findall(r"--\S+", container["command"][2]), "")
    assert (config.compile_cache, str(workdir), values["TANGO_DISTRIBUTED"]) == ("/share/xla", "/share/7b", "1")


# The image. No builder of images is needed here: what it would copy and run is read from the file.


def test_the_image_has_what_the_jobset_runs():
    text = (LAUNCH / "Dockerfile").read_text()
    instructions = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    container = jobset("tpu")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert re.findall(r"^WORKDIR (.*)$", instructions, flags=re.MULTILINE) == [container["workingDir"]]
    for sources in re.findall(r"^COPY (.*) \./$", instructions, flags=re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    for command in re.findall(r"^RUN (.*)$", instructions, flags=re.MULTILINE):
        subprocess.run(["bash", "-n", "-c", command], check=True)
    accelerators = set(re.findall(r"ACCELERATOR=(\w+)", text))
    assert accelerators == {"tpu", "cuda12"} and accelerators <= set(metadata("jax").get_all("Provides-Extra"))
    python = re.search(r"^ARG BASE=python:(3\.\d+)-slim\nFROM \$BASE$", instructions, flags=re.MULTILINE)[1]
    wanted = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert int(wanted[1]) <= int(python.split(".")[1]) < int(wanted[2])
    command = json.loads(re.search(r"^CMD (.*)$", instructions, flags=re.MULTILINE)[1])
    assert f"{command[0]} = " in (ROOT / "pyproject.toml").read_text()
