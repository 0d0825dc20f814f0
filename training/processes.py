"""
The processes of a run, which are one or those of torchrun: who is who, how they agree, and the signals that ask them to stop.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from configurator import TORCHRUN, UserError, once_per_machine, say

SIGNALS = [getattr(signal, name) for name in ('SIGINT', 'SIGTERM', 'SIGUSR1', 'SIGHUP') if hasattr(signal, name)]


def watch_signals():
    """ -> a list that holds the number of the signal that asked the run to stop; a second one stops it at once """
    received, at = [], []

    def on_signal(number, frame):
        if received and time.monotonic() > at[0] + 0.5:  # what comes together is one: a launcher may pass on what the group got too
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)  # nothing else here: the loop finishes its step, saves and leaves
        at.append(time.monotonic())

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, on_signal)
    return received


def read_ranks():
    """ rank, world_size, local_rank: of torchrun, or of this process alone; a UserError for what another launcher has left behind """
    found = {key: text for key in TORCHRUN if (text := os.environ.get(key, '').strip())}
    shown = ', '.join(f'{key} = {text!r}' for key, text in found.items())
    way_out = f"unset {' '.join(found)}, or start with torchrun"
    try:
        rank, world_size, local_rank = (int(found.get(key, alone)) for key, alone in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    except ValueError:
        raise UserError(f"{shown} in the environment: these should be numbers; {way_out}") from None
    if (world_size != 1 or rank or local_rank) and len(found) < len(TORCHRUN):
        raise UserError(f"{shown} in the environment, but no {', '.join(key for key in TORCHRUN if key not in found)}: left by another "
                        f"launcher? {way_out}")
    if not 0 <= local_rank <= rank < world_size:
        raise UserError(f"{shown} in the environment contradict each other; {way_out}")
    tasks = os.environ.get('SLURM_STEP_NUM_TASKS', '').strip()
    if world_size == 1 and tasks.isdecimal() and int(tasks) > 1:
        raise UserError(f"srun has started this {tasks} times; let it start one torchrun on each node, as in srun --ntasks-per-node=1 "
                        "torchrun --nproc_per_node=8 ... train.py (docs/runs.md), or unset SLURM_STEP_NUM_TASKS, if these are runs of "
                        "their own")
    return rank, world_size, local_rank


def once(text):
    """ text, with the number of the process that says it; '' when another process of the run has said the same """
    if not dist.is_initialized():
        return once_per_machine(text)
    try:
        is_first = dist.distributed_c10d._get_default_store().add(f'said {text}', 1) == 1
    except Exception:  # the process that held the store is gone
        is_first = True
    return (f"rank {dist.get_rank()}: {text}" if dist.get_rank() else text) if is_first else ''


def say_once(text):
    if text := once(text):
        say(text)


class Processes:
    """ rank: of this one among the world_size of them all; local_rank: on its machine. All call a method at the same point. """

    def __init__(self):
        self.rank, self.world_size, self.local_rank = read_ranks()

    def connect(self, device):
        if self.world_size > 1:
            if device.type == 'cuda':
                dist.init_process_group('nccl', device_id=device)
            else:
                dist.init_process_group('gloo')
            self.cpu_group = dist.new_group(backend='gloo')  # agrees without waiting for the GPUs

    def say(self, text):
        """ a line, from one of them; for the time before there is a tracker """
        if self.rank == 0:
            say(text)

    def wait(self):
        """ until all are here """
        if self.world_size > 1:
            dist.barrier(self.cpu_group)

    def leave(self):
        """ together, at a good end; after an error the others may be stuck, and this process just ends """
        if self.world_size > 1:
            self.wait()
            dist.destroy_process_group()

    def share(self, values):
        """ the list of rank 0, in all """
        if self.world_size > 1:
            dist.broadcast_object_list(values)
        return values

    def any(self, flag):
        """ whether flag is true in one of them """
        if self.world_size == 1:
            return bool(flag)
        asked = torch.tensor(float(bool(flag)))
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.cpu_group)
        return bool(asked)

    def sum(self, tensor):
        """ over all of them, in place """
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor
