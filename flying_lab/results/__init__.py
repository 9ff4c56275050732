"""Results of a replay: a row for each request, and the metrics of these rows."""
