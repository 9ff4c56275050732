"""What stock vLLM answers: requests, a recorder, its recordings, and how to compare with them."""
