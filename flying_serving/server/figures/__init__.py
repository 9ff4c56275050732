"""What the API server knows that `observe` shows: samples, predictions, switches, the state of the view."""
