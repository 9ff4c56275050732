"""Tests that start servers, and others that take long."""
