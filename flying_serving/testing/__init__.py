"""What demo, bench, benchmarks and tests need of a server: tiny models, server processes, streamed completions."""
