"""State that processes of a server share, and communicators of aligned groups of engines.

- `order.py`: sequence numbers, which put all messages between engines in one order.
- `pulse.py`, `life.py`: counters and locks by which a process shows that it lives.
- `waits.py`: the time that a process has waited, by a clock that stops while the process does.
- `board.py`: the ends of engines' steps, the tokens that they sampled, the load of their groups.
- `mapped.py`, `group_files.py`: mapped files of numbers; the names of groups' files.
- `pool.py`, `communicator.py`: the communicator of each group, made once at start.
- `watchdog.py`: the thread that ends waits of a device for lost engines.
- `shm.py`, `shm_ranks.py`, `shm_kernels.py`: collectives over shared memory on the CPU: waits with
  deadlines, the other ranks, the compiled loops. `parts.py`: the equal parts of an exchange.
"""
