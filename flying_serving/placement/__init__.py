"""The cores, the number of threads and the memory of each device of an engine on the CPU."""
