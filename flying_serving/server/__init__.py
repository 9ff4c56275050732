"""The API server's side: launch, engine client, admin routes."""
