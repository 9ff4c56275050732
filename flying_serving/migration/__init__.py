"""Migration of a request and its KV to another group: the messages, the holders of KV, and the copy itself."""
