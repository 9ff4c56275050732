"""The engine process: its loop, groups, tickets, turns."""
