"""What a replay gave: a row for each request, and the metrics of them."""
