"""The engine process: lanes, group stepping, inbox, turns."""
