"""Chapters: functions of a live server, which is idle before and after each."""
