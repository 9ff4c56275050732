"""Which cores, how many threads and which memory each device of an engine has on the CPU."""
