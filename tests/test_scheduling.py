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


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's scheduling policies")
def test_all_threads_run_as_batch_jobs_but_those_with_a_policy_of_their_own() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
