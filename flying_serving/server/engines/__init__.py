"""The life of engines: processes, losses and returns, and the end of the server."""
