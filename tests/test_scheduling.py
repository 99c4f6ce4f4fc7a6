"""Ranks on CPUs run as batch jobs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading
from flexsearch.ranks import prefer_throughput
end, ready, chosen = threading.Event(), threading.Barrier(3), []
def wait(policy):
    if policy is not None:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    chosen.append((policy, threading.get_native_id()))
    ready.wait()
    end.wait()
for policy in (None, os.SCHED_IDLE):
    threading.Thread(target=wait, args=(policy,)).start()
ready.wait()
prefer_throughput()
found = {policy: os.sched_getscheduler(thread) for policy, thread in chosen}
end.set()
print(os.sched_getscheduler(0) == os.SCHED_BATCH, found[None] == os.SCHED_BATCH, found[os.SCHED_IDLE] == os.SCHED_IDLE)
"""


batch = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's scheduling policies")


@batch
def test_all_threads_run_as_batch_jobs_but_those_with_a_policy_of_their_own() -> None:
    assert printed(SCRIPT) == ["True"] * 3


JOIN = """
import os
from flexsearch.runtime.group import join
from flexsearch.topology import Topology
join(Topology.load("ethernet-1g:1"), 30.0)
print({os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")} == {os.SCHED_BATCH}, flush=True)
"""


@batch
def test_a_rank_on_a_cpu_does_so_and_gloos_threads_with_it() -> None:
    assert printed(JOIN) == ["True"]


def printed(script: str) -> list[str]:
    """Words that a script prints in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    return ran.stdout.split()
