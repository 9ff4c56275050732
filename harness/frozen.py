"""Imported last by the process that servers are forked from, to make them start sooner.

What vLLM asks of a model's class it asks in a new interpreter, to keep its own clean: 7 s for each
class, and a server imports the class a little later anyway. Servers that tests start as a user
would still do so.

Garbage collection leaves alone what has been imported. Of a server each process would look at all
of it, 0.5 s each time, and copy the memory that it is in.
"""

import gc

from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda work: work()
gc.collect()
gc.freeze()
