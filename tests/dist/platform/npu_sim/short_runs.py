"""Scripts that end right after their last backward pass, as many as the first argument says, as many at a time as the second; prints how each ended.

They are forked from a process that has imported torch and nothing of it used, and end as every Python process ends.
"""

import gc
import os
import sys

import torch

from hyper_parallel.platform import npu_sim

torch.set_num_threads(1)
gc.freeze()  # else every script would copy all of torch's objects when it ends
count, at_once = map(int, sys.argv[1:3])
statuses, running = [], 0
parent = os.getpid()
for _ in range(count):
    if running == at_once:
        statuses.append(os.waitstatus_to_exitcode(os.wait()[1]))
        running -= 1
    if os.fork() == 0:
        break
    running += 1

if os.getpid() == parent:
    statuses += [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(running)]
    print(statuses)
else:
    npu_sim.install()
    if "--in-a-thread-of-torch" in sys.argv:
        torch._C._set_multithreading_enabled(True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to("npu")
    model(torch.ones(8, 64, device="npu")).sum().backward()
