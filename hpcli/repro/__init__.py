"""repro: known faults re-enacted on real ranks, the wrong value beside the right one."""
