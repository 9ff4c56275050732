"""What users build on: flags, routes, metrics."""
