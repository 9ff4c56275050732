"""A request and its KV go to another group of engines: what is said, who keeps what, and the copy itself."""
