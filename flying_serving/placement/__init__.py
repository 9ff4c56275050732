"""The cores and the number of threads of each device of an engine on the CPU."""
