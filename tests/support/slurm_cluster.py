"""A SLURM cluster of one node with two CPUs and two GPUs in name only: this machine's slurmctld and slurmd."""

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

from support.launching import environment
from support.paths import ROOT
from support.processes import HANG_S, wait_for

# Daemons live where only root's PATH leads.
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")

CONFIG = """
ClusterName=tango
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
# One user, one machine: no munge.
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
# This machine need not have two cores.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:a100:2 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Cluster(NamedTuple):
    """Its folder, and the environment that its commands find it by."""

    folder: Path
    environment: dict[str, str]
    daemons: list[subprocess.Popen]

    def command(self, *arguments: object) -> str:
        words = [str(item) for item in arguments]
        done = subprocess.run(words, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` tells, by name."""
        shown = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(item.split("=", 1) for item in shown.split() if "=" in item)

    def wait_for_state(self, number: str, *states: str) -> dict[str, str]:
        wait_for(lambda: self.job(number)["JobState"] in states, f"job {number} is {' or '.join(states)}")
        return self.job(number)

    def stop(self) -> None:
        if all(daemon.poll() is None for daemon in self.daemons):
            self.command("scancel", "--state=PENDING")
            self.command("scancel", "--signal=KILL", "--full", "--state=RUNNING")
            wait_for(lambda: not self.command("squeue", "--noheader", "--states=R,CG"), "all jobs end")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=HANG_S)
            except subprocess.TimeoutExpired:
                daemon.kill()


def is_installed() -> bool:
    return all(shutil.which(program, path=PATH) for program in PROGRAMS)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def start_cluster(folder: Path) -> Cluster:
    """Raises AssertionError with the daemons' logs if it does not come up."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    control_port, node_port = free_ports(2)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().split(".")[0], user=getpass.getuser(), folder=folder,
                                    control_port=control_port, node_port=node_port))
    for i in (0, 1):
        (folder / f"gpu{i}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu Type=a100 File={folder}/gpu[0-1]\n")
    daemons = []
    cluster = Cluster(folder, environment(SLURM_CONF=str(config), PATH=PATH), daemons)
    for name in ("slurmctld", "slurmd"):
        with open(folder / f"{name}.log", "w") as log:
            command = [shutil.which(name, path=PATH), "-D", "-f", config]
            daemons.append(subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log))
    try:
        wait_for(lambda: is_idle(cluster), "the node is idle")
    except AssertionError as error:
        for daemon in daemons:
            daemon.kill()
        logs = [(folder / f"{name}.log").read_text() for name in ("slurmctld", "slurmd")]
        raise AssertionError("\n".join(logs)) from error
    return cluster


def is_idle(cluster: Cluster) -> bool:
    command = ["sinfo", "--noheader", "--format=%T"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    return done.stdout.strip() == "idle"  # an error as long as slurmctld does not answer
