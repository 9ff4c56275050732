"""Commands of `flying-serving`.

- `main.py`: the entry point, which calls the command that is named.
- `serve.py`: `serve`, vLLM's own server and flags, with engines that merge and split.
- `serve_flags.py`: the flags of `serve` that vLLM does not have, in groups.
- `flags.py`: flags of a command from the fields of a pydantic model.
- `admin.py`: `status`, `layout`, `switches` and `drain`, for a running server; `doctor`.
- `connection.py`: the connection to a running server, and the printing of its answers.
- `render.py`: tables of a server's reports, from JSON.
- `checks.py`: the checks of `doctor`.
- `model_check.py`: `doctor MODEL`: engines are started as by `serve`, checked, and ended.
- `top.py`: `top`, the live view in a terminal.
- `live_view.py`: what `top` shows, from the JSON of `GET /flying/view`.
- `lab.py`: the table of the laboratory's commands, which is imported when one is called.
- `version.py`: `--version`.
"""
