"""`--trace-out`: the work of each engine and its times, in the JSON array form of Chrome's trace
event format.

- `events.py`: the events of the format.
- `writer.py`: events on their way to the file, by a thread.
- `file.py`: the file, which all processes of a server write to.
"""
