"""Tests of the live view."""
