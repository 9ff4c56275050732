"""What an engine does next: which lane steps, and how many prompt tokens a step takes. Pure."""
